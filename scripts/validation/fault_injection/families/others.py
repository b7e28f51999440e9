"""Families that the benchmark was not made with: of Hugging Face, each tiny.

They differ in what a GEMM reads and what its output becomes: attention and MLP side by side (GPT-NeoX), norms on either side
and logits that are capped (Gemma 2), normalized queries and keys (Qwen3), a bidirectional encoder (RoBERTa with norms
first), an encoder and a decoder (T5), latent attention and shared experts (DeepSeek-V3), and no attention at all (Mamba).
Added later: norms behind each block (OLMo 2), one norm before attention and MLP (Phi), an encoder whose Q, K and V are one
GEMM (ModernBERT), and an encoder and a decoder of another kind (mBART).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from fault_injection.families.family import (
    BATCH,
    EMULATED,
    SEQUENCE,
    VOCABULARY,
    Family,
    additive_mask,
    find_site,
    text_batch,
)
from fault_injection.fault import Batch, Site

HIDDEN, FFN, HEADS, EXPERTS = 64, 128, 4, 3
#: byte that stands for one that is to be told, and of how many one is
HIDDEN_BYTE, ONE_OF = 0, 6
#: label of a byte that is not to be told
IGNORED = -100
#: positions at the end of a text that an encoder must not see
UNSEEN = 8

_WIDTHS = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "initializer_range": HIDDEN**-0.5,  # so that each layer counts
}
_COMMON = {"use_cache": False, "attn_implementation": "eager"}
_GROUPED = {"num_key_value_heads": 2, "head_dim": HIDDEN // HEADS}
#: reader of an X, or several with commas, and its producer, each behind the name of their layer
Sites = Mapping[str, str]


@dataclass(frozen=True)
class Other:
    """One of them."""

    name: str
    make: Callable[[int], nn.Module]
    layers: tuple[str, ...]
    #: how the name of a layer begins, with {} for its number
    layer: str
    sites: Sites
    changeable: tuple[str, ...]
    logits: Callable[[nn.Module, torch.Tensor, bool], torch.Tensor]
    depth: int = 2
    batch: int = BATCH
    learning_rate: float = 2e-3
    engines: tuple[str, ...] = EMULATED

    def build(self, seed: int, depth: int, engine: str) -> nn.Module:
        torch.manual_seed(seed)
        return self.make(depth).bfloat16()

    def draw(self, order: int, step: int) -> Batch:
        return text_batch(order, step)

    def loss(self, model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
        tokens, labels = batch
        logits = self.logits(model, tokens, masked).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, : logits.shape[1]].flatten())

    def site_of(self, gemm: str) -> Site:
        return find_site(self.sites, gemm)

    def prefix_of(self, layer: int) -> str:
        return self.layer.format(layer)


@dataclass(frozen=True)
class Denoiser(Other):
    """It gets a text of which some bytes are hidden, and tells these, or all of them."""

    tells_all: bool = False

    def draw(self, order: int, step: int) -> Batch:
        tokens, _ = text_batch(order, step)
        generator = torch.Generator().manual_seed(order * 1_000_003 + step)
        hidden = torch.randint(ONE_OF, tokens.shape, generator=generator) == 0
        return tokens.masked_fill(hidden, HIDDEN_BYTE), tokens if self.tells_all else tokens.masked_fill(~hidden, IGNORED)


def _of_decoder(model: nn.Module, tokens: torch.Tensor, masked: bool) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, attention_mask=additive_mask(masked)).logits
    return logits


def _of_encoder(model: nn.Module, tokens: torch.Tensor, masked: bool) -> torch.Tensor:
    seen = torch.ones_like(tokens)
    seen[:, -UNSEEN:] = int(not masked)
    logits: torch.Tensor = model(input_ids=tokens, attention_mask=seen).logits[:, :-UNSEEN]
    return logits


def _of_both(model: nn.Module, tokens: torch.Tensor, masked: bool) -> torch.Tensor:
    """The decoder is told the bytes before each, unless they are hidden."""
    before = nn.functional.pad(tokens[:, :-1], (1, 0))
    logits: torch.Tensor = model(
        input_ids=tokens, decoder_input_ids=before, decoder_attention_mask=additive_mask(masked)
    ).logits
    return logits


def _without_attention(model: nn.Module, tokens: torch.Tensor, masked: bool) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens).logits
    return logits


def _made(model: str, *depth_options: str, **options: Any) -> Callable[[int], nn.Module]:
    """Builds models of Hugging Face.

    Args:
        model: the name of a class, whose configuration it tells.
        depth_options: what the number of layers is called.
    """

    def build(depth: int) -> nn.Module:
        made: type[nn.Module] = getattr(transformers, model)
        config: Any = made.config_class
        return made(config(**options, **dict.fromkeys(depth_options, depth)))

    return build


_neox = _made(
    "GPTNeoXForCausalLM",
    "num_hidden_layers",
    **_WIDTHS,
    **_COMMON,
    max_position_embeddings=SEQUENCE,
    attention_bias=False,
)
_gemma = _made("Gemma2ForCausalLM", "num_hidden_layers", **_WIDTHS, **_COMMON, **_GROUPED, query_pre_attn_scalar=16)
_qwen = _made("Qwen3ForCausalLM", "num_hidden_layers", **_WIDTHS, **_COMMON, **_GROUPED)
_roberta = _made(
    "RobertaPreLayerNormForMaskedLM",
    "num_hidden_layers",
    **_WIDTHS,
    attn_implementation="eager",
    max_position_embeddings=SEQUENCE + 2,
    type_vocab_size=1,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    is_decoder=False,
)
_t5 = _made(
    "T5ForConditionalGeneration",
    "num_layers",
    vocab_size=VOCABULARY,
    d_model=HIDDEN,
    d_kv=HIDDEN // HEADS,
    d_ff=FFN,
    num_heads=HEADS,
    dropout_rate=0.0,
    feed_forward_proj="gated-gelu",
    use_cache=False,
    tie_word_embeddings=False,
)
_deepseek = _made(
    "DeepseekV3ForCausalLM",
    "num_hidden_layers",
    **_WIDTHS,
    **_COMMON,
    num_key_value_heads=HEADS,
    max_position_embeddings=SEQUENCE,
    moe_intermediate_size=HIDDEN,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)
_mamba = _made(
    "MambaForCausalLM",
    "num_hidden_layers",
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    state_size=8,
    initializer_range=HIDDEN**-0.5,
    use_cache=False,
    use_mambapy=False,
)
_olmo = _made("Olmo2ForCausalLM", "num_hidden_layers", **_WIDTHS, **_COMMON, num_key_value_heads=HEADS)
_phi = _made("PhiForCausalLM", "num_hidden_layers", **_WIDTHS, **_COMMON, max_position_embeddings=SEQUENCE)
_modernbert = _made(
    "ModernBertForMaskedLM",
    "num_hidden_layers",
    **_WIDTHS,
    attn_implementation="eager",
    max_position_embeddings=SEQUENCE,
    initializer_cutoff_factor=2.0,
    pad_token_id=1,
)
_mbart = _made(
    "MBartForConditionalGeneration",
    "encoder_layers",
    "decoder_layers",
    **_COMMON,
    vocab_size=VOCABULARY,
    d_model=HIDDEN,
    encoder_ffn_dim=FFN,
    decoder_ffn_dim=FFN,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    max_position_embeddings=SEQUENCE,
    init_std=HIDDEN**-0.5,
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    tie_word_embeddings=False,
)
_GATED = {"mlp.gate_proj,mlp.up_proj": "post_attention_layernorm", "mlp.down_proj": "mlp.up_proj"}
_ATTENTION = {
    "self_attn.q_proj,self_attn.k_proj,self_attn.v_proj": "input_layernorm",
    "self_attn.o_proj": "self_attn.v_proj",
}
_OF_T5 = {
    "SelfAttention.q,SelfAttention.k,SelfAttention.v": "layer_norm",
    "SelfAttention.o": "SelfAttention.v",
    "EncDecAttention.q": "layer_norm",
    "EncDecAttention.o": "EncDecAttention.v",
    "DenseReluDense.wi_0,DenseReluDense.wi_1": "layer_norm",
    "DenseReluDense.wo": "DenseReluDense.wi_1",
}

_ALL = (
    Other(
        "neox",
        _neox,
        ("gpt_neox.layers.*",),
        "gpt_neox.layers.{}.",
        {
            "attention.query_key_value": "input_layernorm",
            "mlp.dense_h_to_4h": "post_attention_layernorm",
            "mlp.dense_4h_to_h": "mlp.act",
        },
        ("query_key_value", "dense_h_to_4h", "dense_4h_to_h"),
        _of_decoder,
    ),
    Other(
        "gemma",
        _gemma,
        ("model.layers.*",),
        "model.layers.{}.",
        {**_ATTENTION, **_GATED, "mlp.gate_proj,mlp.up_proj": "pre_feedforward_layernorm"},
        ("q_proj", "gate_proj", "down_proj"),
        _of_decoder,
    ),
    Other(
        "qwen",
        _qwen,
        ("model.layers.*",),
        "model.layers.{}.",
        {**_ATTENTION, **_GATED},
        ("q_proj", "gate_proj", "down_proj"),
        _of_decoder,
    ),
    Denoiser(
        "roberta",
        _roberta,
        ("*.encoder.layer.*",),
        "roberta_prelayernorm.encoder.layer.{}.",
        {
            "attention.self.query,attention.self.key,attention.self.value": "attention.LayerNorm",
            "attention.output.dense": "attention.self.value",
            "intermediate.dense": "intermediate.LayerNorm",
            "output.dense": "intermediate",
        },
        ("query", "dense"),
        _of_encoder,
    ),
    Denoiser(
        "t5",
        _t5,
        ("encoder.block.*", "decoder.block.*"),
        "decoder.block.{}.",
        _OF_T5,
        ("q", "o", "wi_0", "wo"),
        _of_both,
        tells_all=True,
    ),
    Other(
        "deepseek",
        _deepseek,
        ("model.layers.*",),
        "model.layers.{}.",
        {
            "self_attn.q_b_proj": "self_attn.q_a_layernorm",
            "self_attn.kv_b_proj": "self_attn.kv_a_layernorm",
            "self_attn.q_a_proj,self_attn.kv_a_proj_with_mqa": "input_layernorm",
            "down_proj": "up_proj",
        },
        ("q_b_proj", "kv_b_proj", "q_a_proj", "down_proj"),
        _of_decoder,
    ),
    Other(
        "mamba",
        _mamba,
        ("*.mixer.*",),
        "backbone.layers.{}.",
        {"mixer.in_proj": "norm"},
        ("in_proj",),
        _without_attention,
    ),
    Other(
        "olmo",
        _olmo,
        ("model.layers.*",),
        "model.layers.{}.",
        {"self_attn.o_proj": "self_attn.v_proj", "mlp.down_proj": "mlp.up_proj"},
        ("o_proj", "down_proj"),
        _of_decoder,
    ),
    Other(
        "phi",
        _phi,
        ("model.layers.*",),
        "model.layers.{}.",
        {
            "self_attn.q_proj,self_attn.k_proj,self_attn.v_proj,mlp.fc1": "input_layernorm",
            "self_attn.dense": "self_attn.v_proj",
            "mlp.fc2": "mlp.activation_fn",
        },
        ("q_proj", "dense", "fc1", "fc2"),
        _of_decoder,
    ),
    Denoiser(
        "modernbert",
        _modernbert,
        ("model.layers.*",),
        "model.layers.{}.",
        {"attn.Wqkv": "attn_norm", "mlp.Wi": "mlp_norm"},
        ("Wqkv", "Wi"),
        _of_encoder,
    ),
    Denoiser(
        "mbart",
        _mbart,
        ("model.encoder.layers.*", "model.decoder.layers.*"),
        "model.decoder.layers.{}.",
        {
            "self_attn.q_proj,self_attn.k_proj,self_attn.v_proj": "self_attn_layer_norm",
            "self_attn.out_proj": "self_attn.v_proj",
            "encoder_attn.q_proj": "encoder_attn_layer_norm",
            "encoder_attn.out_proj": "encoder_attn.v_proj",
            "fc1": "final_layer_norm",
            "fc2": "activation_fn",
        },
        ("q_proj", "out_proj", "fc1", "fc2"),
        _of_both,
        tells_all=True,
    ),
)
FAMILIES: dict[str, Family] = {one.name: one for one in _ALL}
