"""What FlashMultiheadAttention refuses, with torch's own error types where torch has one."""

# ruff: noqa: E501 - one refusal a line
import pytest
import torch
from cases import cu_seqlens
from torch import nn

from flashmod import FlashMultiheadAttention

E, H = 12, 3
F, T = False, True


REFUSALS = {
    "causal_alone": (RuntimeError, "Need attn_mask if specifying the is_causal hint", {"is_causal": T}),
    "two_paddings": (ValueError, "give one of", {"lengths": torch.tensor([5, 5]), "key_padding_mask": torch.zeros(2, 5).bool()}),
    "padding_shape": (AssertionError, r"key_padded_mask.shape\[1\] to be 5, but got 4", {"key_padding_mask": torch.zeros(2, 4).bool()}),
    "padding_dtype": (AssertionError, "only bool and floating types", {"key_padding_mask": torch.zeros(2, 5).int()}),
    "packed_batched": (ValueError, r"cu_seqlens needs packed \(T, E\) input, got shape \(2, 5, 12\)", {"cu_seqlens": cu_seqlens([5])}),
    "lengths_list": (TypeError, "lengths must be a tensor, got list", {"lengths": [5, 5], "need_weights": F}),
    "lengths_shape": (ValueError, r"\(2,\).*got \(3,\)", {"lengths": torch.tensor([5, 5, 5]), "need_weights": F}),
    "lengths_beyond": (ValueError, "sequence 1 of q ends at row 6, but q has 5 rows", {"lengths": torch.tensor([5, 6]), "need_weights": F}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "kwargs"), REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused(kind, message, kwargs):
    ours, x = FlashMultiheadAttention(E, H, batch_first=True), torch.randn(2, 5, E)
    with pytest.raises(kind, match=message):
        ours(x, x, x, **kwargs)


MASKS_THAT_TORCH_REFUSES = {
    "square": {"attn_mask": torch.zeros(4, 4)},
    "shape_2d": {"attn_mask": torch.zeros(1, 5)},
    "shape_3d": {"attn_mask": torch.zeros(2, 5, 5)},
    "one_head": {"attn_mask": torch.zeros(1, 5, 5)},
    "four_axes": {"attn_mask": torch.zeros(2, 3, 5, 5)},
    "one_axis": {"attn_mask": torch.zeros(5)},
    "integers": {"attn_mask": torch.zeros(5, 5).int()},
    "padding_axes": {"key_padding_mask": torch.zeros(5).bool()},
    "padding_shape": {"key_padding_mask": torch.zeros(2, 4).bool()},
    "padding_batch": {"key_padding_mask": torch.zeros(1, 5).bool()},
    "padding_integers": {"key_padding_mask": torch.zeros(2, 5).int()},
    "hint_alone": {"is_causal": True},
}


@pytest.mark.parametrize("need_weights", [F, T])
@pytest.mark.parametrize("kwargs", MASKS_THAT_TORCH_REFUSES.values(), ids=MASKS_THAT_TORCH_REFUSES)
def test_masks_are_refused_with_torchs_type_and_words(kwargs, need_weights):
    x, errors = torch.randn(2, 5, E), []
    for kind in (nn.MultiheadAttention, FlashMultiheadAttention):
        with pytest.raises(Exception) as caught:
            kind(E, H, batch_first=True)(x, x, x, need_weights=need_weights, **kwargs)
        errors.append(caught.value)
    theirs, ours = errors
    assert type(ours) is type(theirs)
    assert (
        str(ours).split(".")[0]
        == str(theirs).replace("torch.Size([", "(").replace("])", ")").split(".")[0]
    )


def test_unbatched_masks_by_head_must_fit():
    x, errors = torch.randn(5, E), []
    for kind in (nn.MultiheadAttention, FlashMultiheadAttention):
        with pytest.raises(AssertionError) as caught:
            kind(E, H)(x, x, x, attn_mask=torch.zeros(2, 5, 5))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_masks_of_ragged_input_must_fit():
    ours, x, cu = FlashMultiheadAttention(E, H), torch.randn(7, E), cu_seqlens([3, 4])
    with pytest.raises(
        RuntimeError, match=r"3D attn_mask is \(2, 4, 4\), but should be \('N \* 3'"
    ):
        ours(x, attn_mask=torch.zeros(2, 4, 4), cu_seqlens=cu)
    with pytest.raises(RuntimeError, match="4D attn_mask is"):
        ours(x, attn_mask=torch.zeros(2, 3, 4, 4), cu_seqlens=cu)
    with pytest.raises(ValueError, match="attn_mask has 3 queries, but sequence 1 has 4"):
        ours(x, attn_mask=torch.zeros(3, 3), cu_seqlens=cu)
    with pytest.raises(ValueError, match="attn_mask must broadcast"):
        ours(x, attn_mask=torch.zeros(3 * H, 4, 4), cu_seqlens=cu)


def test_constructor_refusals():
    for theirs in ((0, 1), (4, 0), (5, 2)):
        with pytest.raises((ValueError, AssertionError)) as expected_error:
            nn.MultiheadAttention(*theirs)
        with pytest.raises(type(expected_error.value), match="embed_dim"):
            FlashMultiheadAttention(*theirs)
    for name in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(NotImplementedError, match=name):
            FlashMultiheadAttention(4, 2, **{name: True})
    for bad in (3, 0, -1, 8):
        with pytest.raises(
            ValueError, match=rf"num_kv_heads must divide num_heads, got {bad} and 4"
        ):
            FlashMultiheadAttention(16, 4, num_kv_heads=bad)
    with pytest.raises(TypeError, match="mask must be a Mask or None, got 'causal'"):
        FlashMultiheadAttention(16, 4, mask="causal")
    with pytest.raises(ValueError, match="kdim"):
        FlashMultiheadAttention(16, 4, num_kv_heads=2, kdim=3)


def test_ragged_refusals():
    ours, x, cu = FlashMultiheadAttention(E, H), torch.randn(7, E), cu_seqlens([3, 4])
    with pytest.raises(ValueError, match="need_weights=False"):
        ours(x, need_weights=True, cu_seqlens=cu)
    with pytest.raises(TypeError, match="cu_seqlens must be a tensor, got list"):
        ours(x, cu_seqlens=[0, 3, 7])
    with pytest.raises(ValueError, match="self-attention"):
        ours(x, x[:5], x[:5], cu_seqlens=cu)
    with pytest.raises(ValueError, match="row 9, but q has 7 rows"):
        ours(x, cu_seqlens=cu_seqlens([3, 6]))
    with pytest.raises(AssertionError, match="embedding dimension of 12, but got 8"):
        ours(torch.randn(5, 2, 8))
    with pytest.raises(AssertionError, match=r"batch dims \(5, 2\) do not match value's \(4, 2\)"):
        ours(torch.randn(6, 2, E), torch.randn(5, 2, E), torch.randn(4, 2, E))
    with pytest.raises(AssertionError, match="dimensions of 12 and 12, but got 12 and 11"):
        ours(torch.randn(6, 2, E), torch.randn(5, 2, E), torch.randn(5, 2, E - 1))
    with pytest.raises(NotImplementedError, match=r"NestedTensor.*enable_nested_tensor=False"):
        ours(torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged), need_weights=F)
