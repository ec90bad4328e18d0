"""Made-up model wheels: a tiny LLaMA in Q4_1, as a GGUF file in a zip archive, in the layout of the real one."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.bundled.wheel import ModelWheel

GGUF = "made_up/tiny.Q4_1.gguf"
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
SPLITTING = "smollm"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIALS, *sorted(ByteLevel.alphabet()), "ĠĠ", "Ġ1"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 2.0**-20}
PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_wheel(folder: Path, name: str = "madeup") -> tuple[Path, ModelWheel, LlamaForCausalLM]:
    """A wheel, what is to be known of it, and the model in it, in float32 with the weights as they are dequantised."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), tie_word_embeddings=True, **CONFIG)).eval()
    file = folder / Path(GGUF).name
    _write_gguf(file, model)
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, GGUF)
    halves = {key: tensor.half() for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    weights = hashlib.sha256()
    for key, tensor in sorted(halves.items()):
        weights.update(f"{key} torch.float16 {list(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    size = wheel.stat().st_size
    return wheel, ModelWheel(name, name, "1.0", size, digest, GGUF, weights.hexdigest(), "none"), model


def _write_gguf(file: Path, model: LlamaForCausalLM) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(2.0**-20)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLITTING)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = model.state_dict()
    _add(writer, "token_embd.weight", state["model.embed_tokens.weight"])
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        place = {"norm": "output_norm", "input_layernorm": "blk.0.attn_norm"}.get(name.split(".")[-1], "blk.0.ffn_norm")
        writer.add_tensor(f"{place}.weight", state[f"{name}.weight"].numpy())
    for name, place in PLACES.items():
        # rotary pairs lie side by side in the file, half a head apart in the module
        heads = {"attn_q": 2, "attn_k": 1}.get(place, 0)
        _add(writer, f"blk.0.{place}.weight", state[f"model.layers.0.{name}.weight"], heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, weight_: torch.Tensor, heads: int = 0) -> None:
    """Write a weight [rows, columns] in Q4_1, and put what that makes of it into `weight_`: q * d + m per block."""
    rows = torch.arange(weight_.shape[0])
    if heads:
        rows = rows.reshape(heads, 2, -1).transpose(1, 2).flatten()
    packed = gguf.quantize(weight_[rows].numpy(), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    blocks = packed.reshape(-1, 20)
    scale, least = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    quants = np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1).astype(np.float32)
    weight_[rows] = torch.from_numpy(quants * scale[:, None] + least[:, None]).reshape(weight_.shape)
