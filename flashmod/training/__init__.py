"""Training: byte corpora, packed batches, a LightningModule and callbacks for anyone's.

Import the parts by module (``flashmod.training.data``, ``.packing``, ``.module``,
``.callbacks``): ``data`` and ``packing`` need torch only, the others one Lightning.
"""
