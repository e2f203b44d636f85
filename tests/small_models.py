"""Small models in the shapes that people have: each calls attention as its original does.

``SMALL[name]()`` gives ``(model, batch)``; the batch is a tuple for ``model(*batch)`` or a dict for
``model(**batch)``. Widths of 16 with two heads; lengths are odd.
"""

import torch
from torch import nn
from torch.nn import functional as F

E, HEADS = 16, 2


def padding(lengths, longest):
    """(N, S) bool as torch's modules take it: True = padding, on the right."""
    return torch.arange(longest) >= torch.tensor(lengths)[:, None]


class PaddedEncoder(nn.Module):
    """``nn.TransformerEncoder`` over token ids, with BatchNorm and Dropout around it."""

    def __init__(self, dropout=0.0, layers=2):
        super().__init__()
        self.embed = nn.Embedding(11, E)
        layer = nn.TransformerEncoderLayer(E, HEADS, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.norm = nn.BatchNorm1d(E)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(E, 3)

    def forward(self, tokens, src_key_padding_mask=None):
        x = self.encoder(self.embed(tokens), src_key_padding_mask=src_key_padding_mask)
        valid = 1.0 if src_key_padding_mask is None else ~src_key_padding_mask[..., None]
        pooled = (x * valid).sum(1)
        return self.head(self.drop(self.norm(pooled)))


class DetrDecoderLayer(nn.Module):
    """DETR's decoder layer: positions join queries and keys only, ``need_weights`` is left out."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(E, HEADS, dropout=dropout)
        self.multihead_attn = nn.MultiheadAttention(E, HEADS, dropout=dropout)
        self.linear1, self.linear2 = nn.Linear(E, 32), nn.Linear(32, E)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(E) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tgt, memory, memory_key_padding_mask, pos, query_pos):
        q = k = tgt + query_pos
        tgt = self.norm1(tgt + self.dropout(self.self_attn(q, k, value=tgt)[0]))
        seen = self.multihead_attn(
            query=tgt + query_pos,
            key=memory + pos,
            value=memory,
            key_padding_mask=memory_key_padding_mask,
        )[0]
        tgt = self.norm2(tgt + self.dropout(seen))
        return self.norm3(tgt + self.dropout(self.linear2(F.relu(self.linear1(tgt)))))


class DetrDecoder(nn.Module):
    """Learned queries look at an image's padded features; layout (L, N, E)."""

    def __init__(self, queries=7, layers=2, dropout=0.0):
        super().__init__()
        self.query_embed = nn.Embedding(queries, E)
        self.layers = nn.ModuleList(DetrDecoderLayer(dropout) for _ in range(layers))
        self.boxes = nn.Linear(E, 4)

    def forward(self, memory, memory_key_padding_mask, pos):
        query_pos = self.query_embed.weight[:, None].expand(-1, memory.shape[1], -1)
        tgt = torch.zeros_like(query_pos)
        for layer in self.layers:
            tgt = layer(tgt, memory, memory_key_padding_mask, pos, query_pos)
        return {"pred_boxes": self.boxes(tgt).sigmoid().transpose(0, 1)}


class NanoGptBlock(nn.Module):
    """nanoGPT: causal self-attention by ``F.scaled_dot_product_attention``."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.c_attn, self.c_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.mlp = nn.Sequential(nn.Linear(E, 32), nn.GELU(), nn.Linear(32, E))
        self.dropout = dropout

    def attention(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """Token ids to logits."""

    def __init__(self, dropout=0.0, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(13, E), nn.Embedding(64, E)
        self.blocks = nn.Sequential(*(NanoGptBlock(dropout) for _ in range(layers)))
        self.ln_f, self.lm_head = nn.LayerNorm(E), nn.Linear(E, 13, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        return self.lm_head(self.ln_f(self.blocks(x)))


class VitEncoderBlock(nn.Module):
    """torchvision's ``EncoderBlock``: batch first, ``need_weights=False``."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(E, eps=1e-6), nn.LayerNorm(E, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(E, HEADS, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(E, 32), nn.GELU(), nn.Linear(32, E))

    def forward(self, input):
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x) + input
        return x + self.mlp(self.ln_2(x))


class ResidualAttentionBlock(nn.Module):
    """open_clip's text block: batch first, a float causal ``attn_mask``, ``need_weights=False``."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.attn = nn.MultiheadAttention(E, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(E, 32), nn.GELU(), nn.Linear(32, E))

    def attention(self, q_x, attn_mask=None):
        attn_mask = attn_mask.to(q_x.dtype) if attn_mask is not None else None
        return self.attn(q_x, q_x, q_x, need_weights=False, attn_mask=attn_mask)[0]

    def forward(self, q_x, attn_mask=None):
        x = q_x + self.attention(self.ln_1(q_x), attn_mask=attn_mask)
        return x + self.mlp(self.ln_2(x))


class ClipText(nn.Module):
    """Blocks under one buffer that holds the causal mask as 0 and -inf."""

    def __init__(self, length=9, layers=2):
        super().__init__()
        self.resblocks = nn.ModuleList(ResidualAttentionBlock() for _ in range(layers))
        mask = torch.full((length, length), float("-inf")).triu_(1)
        self.register_buffer("attn_mask", mask, persistent=False)

    def forward(self, x):
        for block in self.resblocks:
            x = block(x, attn_mask=self.attn_mask)
        return x[:, -1]


def padded_encoder(dropout=0.0):
    mask = padding([5, 9, 2], 9)
    return PaddedEncoder(dropout), (torch.randint(0, 11, (3, 9)), mask)


def detr_decoder(dropout=0.0):
    memory, pos = torch.randn(11, 2, E), torch.randn(11, 1, E)
    mask = padding([11, 6], 11)
    batch = {"memory": memory, "memory_key_padding_mask": mask, "pos": pos}
    return DetrDecoder(dropout=dropout), batch


def nano_gpt(dropout=0.0):
    return NanoGpt(dropout), (torch.randint(0, 13, (2, 9)),)


def vit_block(dropout=0.0):
    return VitEncoderBlock(dropout), (torch.randn(2, 7, E),)


def clip_text():
    return ClipText(), (torch.randn(3, 9, E),)


SMALL = {
    "padded_encoder": padded_encoder,
    "detr_decoder": detr_decoder,
    "nano_gpt": nano_gpt,
    "vit_block": vit_block,
    "clip_text": clip_text,
}
