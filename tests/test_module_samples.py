"""torch's own samples for ``nn.MultiheadAttention``, as its test suite draws them."""

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

from flashmod import FlashMultiheadAttention

(INFO,) = [info for info in module_db if info.module_cls is nn.MultiheadAttention]
# Of one sample beside twice stock's own error; some samples have scores of 100 and more.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 8e-2}


def results(kind, sample, dtype, training, computed):
    """Output, weights, and the gradients of parameters and inputs, computed in one dtype."""
    torch.manual_seed(3)
    built, given = sample.constructor_input, sample.forward_input
    module = kind(*built.args, **built.kwargs, dtype=dtype).train(training).to(computed)
    args = [x.detach().to(computed, copy=True).requires_grad_() for x in given.args]
    out, weights = module(*args, **given.kwargs)
    (out.double().sin().sum() + weights.double().cos().sum()).backward()
    return [out.detach(), weights.detach(), *(p.grad for p in (*module.parameters(), *args))]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_torchs_samples(dtype):
    """Judged by torch's module in float64 on the same rounded numbers."""
    samples = [
        (training, sample)
        for training in (False, True)
        for sample in INFO.module_inputs_func(
            INFO, device="cpu", dtype=dtype, requires_grad=False, training=training
        )
    ]
    assert len(samples) == 128
    errors = []
    for training, sample in samples:
        truth = results(nn.MultiheadAttention, sample, dtype, training, torch.float64)
        stock = results(nn.MultiheadAttention, sample, dtype, training, dtype)
        ours = results(FlashMultiheadAttention, sample, dtype, training, dtype)
        for wanted, theirs, mine in zip(truth, stock, ours, strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, dtype)
            scale = max(1.0, float(wanted.abs().max()))
            errors.append([float((x - wanted).abs().max()) / scale for x in (theirs, mine)])
    stock, ours = torch.tensor(errors, dtype=torch.float64).T
    assert (ours <= 2 * stock + TOLERANCES[dtype]).all(), (ours - 2 * stock).max()
    assert ours.mean() <= 1.25 * stock.mean() + 4 * torch.finfo(dtype).eps
