"""What the rules of `shrinking` get wrong, by model type of a configuration or of a part of one."""

from typing import Any

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
#: Positions in three axes, which share out the 8 pairs of a head of 16; or the 4 of its rotated half.
_THREE_AXES = {"rope_parameters": {**_PLAIN, "mrope_section": [4, 2, 2]}}
_THREE_AXES_OF_HALF = {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
#: Their defaults lack the numbers of experts.
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_MAMBA_HEADS = {"mamba_n_heads": 8}  # of 16, twice the width
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA_HEADS, "attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 127}},
    "chameleon_vqgan": {"base_channels": 32, "resolution": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}, **_SLIDING},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {**_EXPERTS, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": _EXPERTS,
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots1": _EXPERTS,
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "dots3_note_text": {
        **_LATENT,
        "per_layer_config": {2: {**_LATENT, "num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 16}},
    },
    "emu3": {"vocabulary_map": {"<image>": 127}},
    "emu3_vqgan": {"base_channels": 32},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_PLAIN, "mrope_section": [3, 3, 2]}},
    "falcon_h1": {**_MAMBA_HEADS, "mamba_d_ssm": 128},
    "florence_vision": {
        "depths": (1, 1, 1, 1),
        "embed_dim": (64, 64, 64, 64),
        "num_groups": (4, 4, 4, 4),
        "num_heads": (4, 4, 4, 4),
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3n_text": {"intermediate_size": 64},
    "glm4v_moe_text": _THREE_AXES_OF_HALF,
    "glm4v_text": _THREE_AXES,
    "glm5_next_text": {"index_topk": 16},
    "glm_ocr_text": _THREE_AXES,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "4/8"},
    "granitemoehybrid": {**_MAMBA_HEADS, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_vl_text": {"rope_parameters": {**_PLAIN, "mrope_section": [2, 2, 2, 2]}},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "inkling2_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4},
    "janus_vision_model": {"num_image_tokens": 4},
    "janus_vqgan": {"base_channels": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "mimi": {"num_filters": 8, "upsample_groups": 64},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "muse_spark_audio": {"hidden_sizes": (16, 16, 16, 16)},
    "muse_glimmer_text": {"output_multiplier": 1.0},
    "muse_spark_text": {"output_multiplier": 1.0},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl_text": _THREE_AXES,
    "paligemma": {"text_config": {"num_key_value_heads": 1}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 126},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 126},
    "qwen2_5_omni_text": _THREE_AXES,
    "qwen2_5_vl_text": _THREE_AXES,
    "qwen2_vl_text": _THREE_AXES,
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": (16, 32), "axial_pos_embds_dim": (32, 32)},
    "step3p5": {"sliding_window": 8},
    "xlnet": {"d_head": 16},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
}

_SHARED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

#: Kinds of layers that no default configuration has: name, model type, settings.
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("alibi", "falcon", {"alibi": True}),
    ("grouped", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("shared", "gemma4_text", {"layer_types": _SHARED, "num_hidden_layers": 4, "num_kv_shared_layers": 2}),
    ("no-window", "mistral", {"sliding_window": None}),
    ("window", "qwen2", {"use_sliding_window": True, "num_hidden_layers": 2, **_SLIDING}),
    ("window", "gpt_neo", {"attention_types": [[["local"], 2]], "window_size": 8}),
)
