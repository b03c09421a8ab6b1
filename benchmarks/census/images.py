"""One network of each family of timm, with few layers, on small images.

timm is no part of the environment: CONTRIBUTING.md says how to have it beside PyTorch for the CPU. Where it cannot be
imported, `MISSING` says so and why, and no network of it is listed. A family is a module of `timm.models`; one that is
not in the table below, of a later timm, is there with the first model it lists, as that is.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[..., Tensor], dict[str, Tensor]]
CLASSES, BATCH = 10, 4


def _declare_ops_of_torchvision() -> torch.library.Library:
    """Say what two ops of torchvision take, which it describes to PyTorch when it is imported.

    Its wheels hold them in a library that loads beside PyTorch for CUDA only. No network of timm runs them.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _import() -> tuple[Any, Any, str]:
    """timm, what must live as long as it, and why it is not there."""
    if importlib.util.find_spec("timm") is None:
        return None, None, "timm is left out: it is not installed. CONTRIBUTING.md says how it is."
    ops = None
    try:
        if importlib.util.find_spec("torchvision") is not None:
            ops = _declare_ops_of_torchvision()
        return importlib.import_module("timm"), ops, ""
    except Exception as error:  # noqa: BLE001  # whatever it is, it is why
        return None, ops, f"timm is left out: it cannot be imported. {type(error).__name__}: {error}"


_timm, _ops, MISSING = _import()


@dataclass(frozen=True)
class Tiny:
    """How a family's network is made small."""

    name: str  # of a model that timm registers, or of the class, where a registered one takes no such options
    size: int  # of an image's sides
    fixed: bool  # whether the model is told the size
    options: dict[str, Any]


def _tiny(name: str, size: int, *, fixed: bool = False, **options: Any) -> Tiny:
    return Tiny(name, size, fixed, options)


TRANSFORMER: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 4}
FAMILIES = {
    "beit": _tiny("beit_base_patch16_224", 128, fixed=True, **TRANSFORMER),
    "byoanet": _tiny("eca_botnext26ts_256", 64, fixed=True),
    "byobnet": _tiny("test_byobnet", 64, fixed=True),
    "cait": _tiny("cait_xxs24_224", 128, fixed=True, **TRANSFORMER),
    "coat": _tiny("coat_tiny", 64, fixed=True, serial_depths=(1, 1, 1, 1), parallel_depth=1),
    "convit": _tiny("convit_tiny", 64, fixed=True, depth=2, local_up_to_layer=1),
    "convmixer": _tiny("ConvMixer", 64, dim=64, depth=2),
    "convnext": _tiny("test_convnext", 64),
    "cpubone": _tiny("cpubone_nano", 64),
    "crossvit": _tiny("crossvit_tiny_240", 64, depth=((1, 1, 0), (1, 1, 0))),
    "csatv2": _tiny("csatv2", 64, depths=(1, 1, 2, 2), transformer_depths=(0, 0, 1, 1)),
    "cspnet": _tiny("cs3darknet_focus_s", 64),
    "cspnext": _tiny("cspnext_tiny", 64),
    "davit": _tiny("davit_tiny", 64, depths=(1, 1, 1, 1), embed_dims=(32, 64, 64, 64), num_heads=(2, 4, 4, 4)),
    "deepseek_vit": _tiny("deepseek_vit_412m", 224, fixed=True, **TRANSFORMER),
    "deit": _tiny("deit_tiny_patch16_224", 128, fixed=True, **TRANSFORMER),
    "densenet": _tiny("densenet121", 64, block_config=(2, 2, 2, 2), growth_rate=8),
    "dla": _tiny("dla46x_c", 64),
    "dpn": _tiny("dpn48b", 64, k_sec=(1, 1, 1, 1)),
    "edgenext": _tiny("edgenext_xx_small", 64, depths=(1, 1, 1, 1)),
    "efficientformer": _tiny("efficientformer_l1", 224, fixed=True, depths=(1, 1, 1, 2)),
    "efficientformer_v2": _tiny("efficientformerv2_s0", 64, fixed=True),
    "efficientnet": _tiny("test_efficientnet", 64),
    "efficientvim": _tiny("efficientvim_m1", 64),
    "efficientvit_mit": _tiny("efficientvit_b0", 64),
    "efficientvit_msra": _tiny("efficientvit_m0", 64, fixed=True),
    "eva": _tiny("eva02_tiny_patch14_224", 128, fixed=True, **TRANSFORMER),
    "fasternet": _tiny("fasternet_t0", 64, depths=(1, 1, 1, 1)),
    "fastvit": _tiny("fastvit_t8", 64, layers=(1, 1, 1, 1)),
    "focalnet": _tiny("FocalNet", 64, depths=(1, 1, 1, 1), embed_dim=32),
    "gcvit": _tiny(
        "GlobalContextVit",
        64,
        fixed=True,
        depths=(1, 1, 1, 1),
        num_heads=(2, 2, 4, 4),
        embed_dim=32,
        window_ratio=(32, 32, 16, 32),
    ),
    "gemma4_vit": _tiny("gemma4_vit_167m", 128, fixed=True, **TRANSFORMER),
    "ghostnet": _tiny("ghostnet_050", 64),
    "hardcorenas": _tiny("hardcorenas_a", 64),
    "hgnet": _tiny("hgnetv2_b0", 64),
    "hiera": _tiny("hiera_tiny_224", 64, fixed=True, stages=(1, 1, 1, 1), embed_dim=32),
    "hieradet_sam2": _tiny(
        "HieraDet", 64, stages=(1, 1, 2, 1), embed_dim=32, global_att_blocks=(3,), window_spec=(8, 4, 14, 7)
    ),
    "hrnet": _tiny("hrnet_w18_small", 64),
    "iformer": _tiny("iformer_t", 64),
    "inception_next": _tiny("inception_next_atto", 64, depths=(1, 1, 1, 1)),
    "inception_resnet_v2": _tiny("inception_resnet_v2", 96),
    "inception_v3": _tiny("inception_v3", 96),
    "inception_v4": _tiny("inception_v4", 96),
    "lcnetv2": _tiny("lcnetv2_small", 64),
    "levit": _tiny(
        "levit_128s", 64, fixed=True, depth=(1, 1, 1), embed_dim=(32, 64, 64), num_heads=(2, 2, 2), key_dim=8
    ),
    "lowformer": _tiny("lowformer_b0", 64),
    "mambaout": _tiny("test_mambaout", 64),
    "maxxvit": _tiny("test_maxvit", 64, fixed=True),
    "metaformer": _tiny("MetaFormer", 64, depths=(1, 1, 1, 1), dims=(32, 64, 64, 64)),
    "mlp_mixer": _tiny("MlpMixer", 128, fixed=True, num_blocks=2, embed_dim=64),
    "mobilenetv3": _tiny("lcnet_035", 64),
    "mobilenetv5": _tiny("mobilenetv5_base", 64),
    "mobilevit": _tiny("mobilevit_xxs", 64, fixed=True),
    "mvitv2": _tiny("mvitv2_tiny", 64, fixed=True),
    "naflexvit": _tiny("naflexvit_base_patch16_gap", 128, fixed=True, **TRANSFORMER),
    "nasnet": _tiny("nasnetalarge", 64, num_features=192, stem_size=8),
    "nest": _tiny("Nest", 64, fixed=True, depths=(1, 1, 1), embed_dims=(32, 64, 64), num_heads=(2, 4, 4)),
    "nextvit": _tiny("NextViT", 64, depths=(1, 1, 5, 1), in_chans=3),
    "nfnet": _tiny("test_nfnet", 64),
    "pit": _tiny("PoolingVisionTransformer", 64, fixed=True, depth=(1, 1, 1), heads=(2, 2, 2), base_dims=(16, 16, 16)),
    "pnasnet": _tiny("pnasnet5large", 64),
    "pvt_v2": _tiny("pvt_v2_b0", 64, depths=(1, 1, 1, 1)),
    "qwen3_vit": _tiny("qwen3_vit_88m", 128, fixed=True, **TRANSFORMER),
    "rdnet": _tiny("rdnet_tiny", 64, num_blocks_list=(1, 1, 1, 1, 1, 1, 1)),
    "regnet": _tiny("regnetx_002", 64),
    "repghost": _tiny("repghostnet_050", 64),
    "repvit": _tiny("repvit_m0_9", 64, fixed=True),
    "res2net": _tiny("res2net50_26w_4s", 64, layers=(1, 1, 1, 1)),
    "resnest": _tiny("resnest14d", 64),
    "resnet": _tiny("test_resnet", 64),
    "resnetv2": _tiny("resnetv2_18", 64, layers=(1, 1, 1, 1)),
    "rexnet": _tiny("rexnet_100", 64),
    "selecsls": _tiny("selecsls42", 64),
    "senet": _tiny("legacy_seresnet18", 64, layers=(1, 1, 1, 1)),
    "sequencer": _tiny(
        "sequencer2d_s", 64, fixed=True, layers=(1, 1, 1, 1), embed_dims=(64, 64, 64, 64), hidden_sizes=(16, 16, 16, 16)
    ),
    "shvit": _tiny("SHViT", 64, depth=(1, 1, 1), types=("i", "s", "s")),
    "sknet": _tiny("skresnet18", 64, layers=(1, 1, 1, 1)),
    "starnet": _tiny("starnet_s050", 64, depths=(1, 1, 1, 1)),
    "swiftformer": _tiny("swiftformer_xs", 64, fixed=True, layers=(1, 1, 1, 1)),
    "swin_transformer": _tiny(
        "swin_tiny_patch4_window7_224", 64, fixed=True, depths=(1, 2, 1, 1), embed_dim=32, num_heads=(2, 4, 4, 4)
    ),
    "swin_transformer_v2": _tiny(
        "swinv2_tiny_window8_256", 64, fixed=True, depths=(1, 2, 1, 1), embed_dim=32, num_heads=(2, 4, 4, 4)
    ),
    "swin_transformer_v2_cr": _tiny(
        "swinv2_cr_tiny_224", 64, fixed=True, depths=(1, 2, 1, 1), embed_dim=32, num_heads=(2, 4, 4, 4)
    ),
    "tiny_vit": _tiny("tiny_vit_5m_224", 64, depths=(1, 1, 1, 1)),
    "tnt": _tiny("tnt_s_patch16_224", 64, fixed=True, depth=2, embed_dim=96, num_heads_outer=4),
    "tresnet": _tiny("tresnet_m", 64, layers=(1, 1, 1, 1)),
    "twins": _tiny("twins_svt_small", 64, fixed=True, depths=(1, 1, 2, 1), embed_dims=(32, 32, 64, 64)),
    "vgg": _tiny("vgg11", 64, mlp_ratio=0.01),
    "visformer": _tiny("visformer_tiny", 64, fixed=True, depth=(1, 1, 1)),
    "vision_transformer": _tiny("test_vit", 64, fixed=True),
    "vision_transformer_hybrid": _tiny("vit_tiny_r_s16_p8_224", 128, fixed=True, **TRANSFORMER),
    "vision_transformer_relpos": _tiny("test_vit_relpos", 64, fixed=True),
    "vision_transformer_sam": _tiny(
        "samvit_base_patch16_224", 128, fixed=True, **TRANSFORMER, global_attn_indexes=(1,)
    ),
    "vitamin": _tiny("vitamin_small_224", 64, fixed=True),
    "volo": _tiny("VOLO", 64, fixed=True, layers=(1, 1, 1, 1), embed_dims=(64, 64, 64, 64), num_heads=(4, 4, 4, 4)),
    "vovnet": _tiny("ese_vovnet19b_slim_dw", 64),
    "xception": _tiny("legacy_xception", 64),
    "xception_aligned": _tiny("xception41p", 64),
    "xcit": _tiny("xcit_nano_12_p8_224", 128, fixed=True, **TRANSFORMER),
}


def models() -> dict[str, str]:
    """Every family, as ``timm/FAMILY``, and the model that stands for it."""
    if _timm is None:
        return {}
    return {f"timm/{family}": _choice(family).name for family in _timm.list_modules()}


def _choice(family: str) -> Tiny:
    return FAMILIES.get(family) or Tiny(_timm.list_models(module=family)[0], 224, False, {})


def make(name: str) -> Made:
    """A network in training mode, its step, and images with their classes."""
    family = name.removeprefix("timm/")
    tiny = _choice(family)
    build: Callable[..., nn.Module] = getattr(importlib.import_module(f"timm.models.{family}"), tiny.name)
    size = {"img_size": tiny.size} if tiny.fixed else {}
    model = build(num_classes=CLASSES, **tiny.options, **size).train()

    def step(images: Tensor, target: Tensor) -> Tensor:
        scores = model(images)
        if isinstance(scores, tuple):  # of two classifiers
            return F.cross_entropy(scores[0], target) + F.cross_entropy(scores[1], target)
        return F.cross_entropy(scores, target)

    images = torch.randn(BATCH, 3, tiny.size, tiny.size)
    return model, step, {"images": images, "target": torch.randint(CLASSES, (BATCH,))}
