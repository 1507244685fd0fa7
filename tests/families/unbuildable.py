"""Families of which no tiny model can be made, with the reason; all others must build."""

#: Name of the family: a part of the error that it gives. Take a line out when the family can be built.
UNBUILDABLE: dict[str, str] = {
    "apertus1p5-image": "must equal `hidden_size`",
    "fast_vlm-image": "requires the timm library",
    "gemma3n": "requires the timm library",
    "gemma4_assistant": "hidden_size_per_layer_input must be 0",
    "perception_lm-image": "requires the timm library",
    "qwen2_5_omni-multimodal": "million parameters",
    "qwen3_omni_moe-multimodal": "has no attribute 'shared_expert_intermediate_size'",
    "vibevoice_asr-multimodal": "million parameters",
}
