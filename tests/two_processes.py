"""Each of the two processes of test_distributed.py: a swapped encoder, wrapped, against alone."""

import copy
import sys

import torch
import torch.distributed as dist
from small_models import padded_encoder
from torch.nn.parallel import DistributedDataParallel

from flashmod import FlashMultiheadAttention, restore_attention, swap_attention


def build():
    """The same model and global batch on every rank; no BatchNorm, which sees one rank's rows."""
    torch.manual_seed(0)
    model, (tokens, hidden) = padded_encoder()
    model.norm = torch.nn.Identity()
    tokens, hidden = torch.cat([tokens, tokens.flip(0)]), torch.cat([hidden, hidden.flip(0)])
    return model, tokens, hidden


def steps(model, tokens, hidden, parts, count=2):
    """SGD on the mean over all rows, of which this process has one part."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = slice(None) if parts == 1 else slice(dist.get_rank() * 3, dist.get_rank() * 3 + 3)
    for _ in range(count):
        optimizer.zero_grad()
        model(tokens[rows], hidden[rows]).sin().mean().backward()
        optimizer.step()


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def shard(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.encoder.layers:
        fully_shard(layer.self_attn)
        fully_shard(layer)
    return fully_shard(model)


def main(kind, store):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(sys.argv[3]), world_size=2
    )
    model, tokens, hidden = build()
    alone = copy.deepcopy(model)
    report = swap_attention(model)
    assert len(report) == 2
    if kind == "ddp":
        model = DistributedDataParallel(model)
        assert len(restore_attention(model)) == 2 and len(swap_attention(model)) == 2
        names = [layer.name for layer in swap_attention(model).skipped]
        assert names[0] == "module.encoder.layers.0.self_attn", names
    else:
        model = shard(model)
        skipped = swap_attention(model).skipped
        assert len(skipped) == 2, skipped
        plain = shard(copy.deepcopy(alone))
        skipped = swap_attention(plain).skipped
        assert "swap the model before you shard it" in skipped[0].notes[0], skipped
    inner = [m for m in model.modules() if isinstance(m, FlashMultiheadAttention)]
    assert len(inner) == 2
    steps(model, tokens, hidden, 2)
    steps(alone, tokens, hidden, 1)
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), right, rtol=1e-4, atol=1e-6)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
