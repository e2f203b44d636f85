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
    for bad in (3, 0, -1, 8):
        with pytest.raises(
            ValueError, match=rf"num_kv_heads must divide num_heads, got {bad} and 4"
        ):
            FlashMultiheadAttention(16, 4, num_kv_heads=bad)
    with pytest.raises(TypeError, match="mask must be a Mask or None, got 'causal'"):
        FlashMultiheadAttention(16, 4, mask="causal")
    with pytest.raises(ValueError, match="kdim"):
        FlashMultiheadAttention(16, 4, num_kv_heads=2, kdim=3)
    with pytest.raises(
        TypeError, match=r"alibi must be True, False or a tensor of slopes, got 0\.5"
    ):
        FlashMultiheadAttention(16, 4, alibi=0.5)
    for slopes in (torch.ones(3), torch.ones(4, requires_grad=True)):
        with pytest.raises(ValueError, match=r"alibi must be \(4,\) slopes without gradient, got"):
            FlashMultiheadAttention(16, 4, alibi=slopes)


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


SHAPES_THAT_TORCH_REFUSES = {
    "query_axes": ((5, 2, 5, E), (5, 2, E), (5, 2, E)),
    "key_axes": ((5, 2, E), (5, E), (5, 2, E)),
    "unbatched_key_axes": ((5, E), (5, 2, E), (5, 2, E)),
    "query_width": ((6, 2, E - 4), (5, 2, E), (5, 2, E)),
    "value_length": ((6, 2, E), (5, 2, E), (4, 2, E)),
    "value_width": ((6, 2, E), (5, 2, E), (5, 2, E - 1)),
}


@pytest.mark.parametrize(
    "shapes", SHAPES_THAT_TORCH_REFUSES.values(), ids=SHAPES_THAT_TORCH_REFUSES
)
@pytest.mark.parametrize("separate", [F, T])
def test_shapes_are_refused_with_torchs_type_and_words(shapes, separate):
    inputs, errors = [torch.randn(shape) for shape in shapes], []
    if separate:
        inputs[1] = inputs[1][..., : E - 2]
    for kind in (nn.MultiheadAttention, FlashMultiheadAttention):
        with pytest.raises(AssertionError) as caught:
            kind(E, H, kdim=E - 2 if separate else None)(*inputs)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] or errors[0].startswith("expecting value weights shape")


@pytest.mark.parametrize("kdim", [None, 5])
def test_widths_that_the_projections_do_not_take(kdim):
    inputs, errors = [torch.randn(shape) for shape in ((6, 2, E), (5, 2, 7), (5, 2, 7))], []
    for kind in (nn.MultiheadAttention, FlashMultiheadAttention):
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            kind(E, H, kdim=kdim, vdim=kdim)(*inputs)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert f"of {kdim or E} and {kdim or E}, but got 7 and 7" in str(errors[1])


def test_one_bias_without_the_other():
    for name in ("bias_k", "bias_v"):
        for kind in (nn.MultiheadAttention, FlashMultiheadAttention):
            module = kind(E, H, add_bias_kv=True)
            setattr(module, name, None)
            with pytest.raises(AssertionError, match=name):
                module(*[torch.randn(5, 2, E)] * 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_input_that_has_no_meaning():
    ours, x = FlashMultiheadAttention(E, H, batch_first=True), torch.randn(7, E)
    jagged = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
    with pytest.raises(AssertionError, match="NestedTensor beside other tensors"):
        ours(jagged, x, x)
    with pytest.raises(AssertionError, match="knows its lengths"):
        ours(jagged, key_padding_mask=torch.zeros(2, 4).bool())
    with pytest.raises(ValueError, match="no rectangular weights"):
        ours(jagged, need_weights=T)
    other = torch.nested.nested_tensor([x[:4], x[4:]], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"equal lengths.*\[0, 3, 7\] and \[0, 4, 7\]"):
        ours(jagged, jagged, other)
    with pytest.raises(AssertionError, match="unbatched 2D or batched 3D tensor but received 1-D"):
        ours(torch.nested.nested_tensor([]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_has_no_gradient_as_in_torch():
    strided = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(4, E)])
    words = "does not support NestedTensor outside of its fast path.*or biases requires_grad"
    for kind in (nn.MultiheadAttention, FlashMultiheadAttention):
        with pytest.raises(AssertionError, match=words):
            kind(E, 2, batch_first=True).eval()(*[strided] * 3)
    with torch.no_grad(), pytest.raises(AssertionError, match="but for self-attention"):
        FlashMultiheadAttention(E, 2)(strided, strided, strided.clone())
