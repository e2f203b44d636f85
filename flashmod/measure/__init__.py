"""Memory, gradient error and throughput of any model's attention; torch only.

with flashmod.measure.track(model) as m:
    loss = step(model, batch)
    m.step(tokens=batch.tokens.numel())
m.summary()
"""

from .capture import Captured
from .dense_memory import DenseSize, Peak, attention_peak, dense_attention_peak, dense_size
from .gradient_error import GradientError, gradient_error
from .memory import peak_mib
from .metrics import Measured, measure_call, measure_step
from .routing import use
from .steps import StepPeaks, dense_step_peak, step_peak, step_peaks
from .throughput import Throughput
from .tracker import Tracker, count_tokens, track

__all__ = [
    "Captured",
    "DenseSize",
    "GradientError",
    "Measured",
    "Peak",
    "StepPeaks",
    "Throughput",
    "Tracker",
    "attention_peak",
    "count_tokens",
    "dense_attention_peak",
    "dense_size",
    "dense_step_peak",
    "gradient_error",
    "measure_call",
    "measure_step",
    "peak_mib",
    "step_peak",
    "step_peaks",
    "track",
    "use",
]
