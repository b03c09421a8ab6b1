"""Networks of timm, one of each family, with few layers, on small images.

timm is no part of the environment: `benchmarks.census.count` says how to have it beside PyTorch for the CPU. Where it
cannot be imported, `MISSING` says so and why, and no network of it is listed. A family is a module of `timm.models`;
one that is not in the table below, of a later timm, is there with the first model it lists, as that is.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, Callable[..., Tensor], dict[str, Tensor]]
CLASSES, BATCH = 10, 4


_ops = torch.library.Library("torchvision", "FRAGMENT")  # lives as long as this module


def _import() -> tuple[Any, str]:
    """timm, or why it is not there."""
    if importlib.util.find_spec("timm") is None:
        return None, "timm is left out: it is not installed. --help says how it is."
    try:
        if importlib.util.find_spec("torchvision") is not None:
            # torchvision describes two ops to PyTorch when it is imported. Its wheels hold them in a library that loads
            # beside PyTorch for CUDA only, and no network of timm runs them.
            for name in ("nms", "qnms"):
                _ops.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("timm"), ""
    except Exception as error:  # noqa: BLE001  # whatever it is, it is why
        return None, f"timm is left out: it cannot be imported. {type(error).__name__}: {error}"


_timm, MISSING = _import()


class Tiny:
    """A small network: a model that timm registers, or a class; the size of an image, which a ``fixed`` one is told."""

    def __init__(self, name: str, size: int, *, fixed: bool = False, **options: Any) -> None:
        self.name, self.size, self.fixed, self.options = name, size, fixed, options


TRANSFORMER: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 4}
FAMILIES = {
    "beit": Tiny("beit_base_patch16_224", 128, fixed=True, **TRANSFORMER),
    "byoanet": Tiny("eca_botnext26ts_256", 64, fixed=True),
    "byobnet": Tiny("test_byobnet", 64, fixed=True),
    "cait": Tiny("cait_xxs24_224", 128, fixed=True, **TRANSFORMER),
    "coat": Tiny("coat_tiny", 64, fixed=True, serial_depths=(1, 1, 1, 1), parallel_depth=1),
    "convit": Tiny("convit_tiny", 64, fixed=True, depth=2, local_up_to_layer=1),
    "convmixer": Tiny("ConvMixer", 64, dim=64, depth=2),
    "convnext": Tiny("test_convnext", 64),
    "cpubone": Tiny("cpubone_nano", 64),
    "crossvit": Tiny("crossvit_tiny_240", 64, depth=((1, 1, 0), (1, 1, 0))),
    "csatv2": Tiny("csatv2", 64, depths=(1, 1, 2, 2), transformer_depths=(0, 0, 1, 1)),
    "cspnet": Tiny("cs3darknet_focus_s", 64),
    "cspnext": Tiny("cspnext_tiny", 64),
    "davit": Tiny("davit_tiny", 64, depths=(1, 1, 1, 1), embed_dims=(32, 64, 64, 64), num_heads=(2, 4, 4, 4)),
    "deepseek_vit": Tiny("deepseek_vit_412m", 224, fixed=True, **TRANSFORMER),
    "deit": Tiny("deit_tiny_patch16_224", 128, fixed=True, **TRANSFORMER),
    "densenet": Tiny("densenet121", 64, block_config=(2, 2, 2, 2), growth_rate=8),
    "dla": Tiny("dla46x_c", 64),
    "dpn": Tiny("dpn48b", 64, k_sec=(1, 1, 1, 1)),
    "edgenext": Tiny("edgenext_xx_small", 64, depths=(1, 1, 1, 1)),
    "efficientformer": Tiny("efficientformer_l1", 224, fixed=True, depths=(1, 1, 1, 2)),
    "efficientformer_v2": Tiny("efficientformerv2_s0", 64, fixed=True),
    "efficientnet": Tiny("test_efficientnet", 64),
    "efficientvim": Tiny("efficientvim_m1", 64),
    "efficientvit_mit": Tiny("efficientvit_b0", 64),
    "efficientvit_msra": Tiny("efficientvit_m0", 64, fixed=True),
    "eva": Tiny("eva02_tiny_patch14_224", 128, fixed=True, **TRANSFORMER),
    "fasternet": Tiny("fasternet_t0", 64, depths=(1, 1, 1, 1)),
    "fastvit": Tiny("fastvit_t8", 64, layers=(1, 1, 1, 1)),
    "focalnet": Tiny("FocalNet", 64, depths=(1, 1, 1, 1), embed_dim=32),
    "gcvit": Tiny(
        "GlobalContextVit",
        64,
        fixed=True,
        depths=(1, 1, 1, 1),
        num_heads=(2, 2, 4, 4),
        embed_dim=32,
        window_ratio=(32, 32, 16, 32),
    ),
    "gemma4_vit": Tiny("gemma4_vit_167m", 128, fixed=True, **TRANSFORMER),
    "ghostnet": Tiny("ghostnet_050", 64),
    "hardcorenas": Tiny("hardcorenas_a", 64),
    "hgnet": Tiny("hgnetv2_b0", 64),
    "hiera": Tiny("hiera_tiny_224", 64, fixed=True, stages=(1, 1, 1, 1), embed_dim=32),
    "hieradet_sam2": Tiny(
        "HieraDet", 64, stages=(1, 1, 2, 1), embed_dim=32, global_att_blocks=(3,), window_spec=(8, 4, 14, 7)
    ),
    "hrnet": Tiny("hrnet_w18_small", 64),
    "iformer": Tiny("iformer_t", 64),
    "inception_next": Tiny("inception_next_atto", 64, depths=(1, 1, 1, 1)),
    "inception_resnet_v2": Tiny("inception_resnet_v2", 96),
    "inception_v3": Tiny("inception_v3", 96),
    "inception_v4": Tiny("inception_v4", 96),
    "lcnetv2": Tiny("lcnetv2_small", 64),
    "levit": Tiny(
        "levit_128s", 64, fixed=True, depth=(1, 1, 1), embed_dim=(32, 64, 64), num_heads=(2, 2, 2), key_dim=8
    ),
    "lowformer": Tiny("lowformer_b0", 64),
    "mambaout": Tiny("test_mambaout", 64),
    "maxxvit": Tiny("test_maxvit", 64, fixed=True),
    "metaformer": Tiny("MetaFormer", 64, depths=(1, 1, 1, 1), dims=(32, 64, 64, 64)),
    "mlp_mixer": Tiny("MlpMixer", 128, fixed=True, num_blocks=2, embed_dim=64),
    "mobilenetv3": Tiny("lcnet_035", 64),
    "mobilenetv5": Tiny("mobilenetv5_base", 64),
    "mobilevit": Tiny("mobilevit_xxs", 64, fixed=True),
    "mvitv2": Tiny("mvitv2_tiny", 64, fixed=True),
    "naflexvit": Tiny("naflexvit_base_patch16_gap", 128, fixed=True, **TRANSFORMER),
    "nasnet": Tiny("nasnetalarge", 64, num_features=192, stem_size=8),
    "nest": Tiny("Nest", 64, fixed=True, depths=(1, 1, 1), embed_dims=(32, 64, 64), num_heads=(2, 4, 4)),
    "nextvit": Tiny("NextViT", 64, depths=(1, 1, 5, 1), in_chans=3),
    "nfnet": Tiny("test_nfnet", 64),
    "pit": Tiny("PoolingVisionTransformer", 64, fixed=True, depth=(1, 1, 1), heads=(2, 2, 2), base_dims=(16, 16, 16)),
    "pnasnet": Tiny("pnasnet5large", 64),
    "pvt_v2": Tiny("pvt_v2_b0", 64, depths=(1, 1, 1, 1)),
    "qwen3_vit": Tiny("qwen3_vit_88m", 128, fixed=True, **TRANSFORMER),
    "rdnet": Tiny("rdnet_tiny", 64, num_blocks_list=(1, 1, 1, 1, 1, 1, 1)),
    "regnet": Tiny("regnetx_002", 64),
    "repghost": Tiny("repghostnet_050", 64),
    "repvit": Tiny("repvit_m0_9", 64, fixed=True),
    "res2net": Tiny("res2net50_26w_4s", 64, layers=(1, 1, 1, 1)),
    "resnest": Tiny("resnest14d", 64),
    "resnet": Tiny("test_resnet", 64),
    "resnetv2": Tiny("resnetv2_18", 64, layers=(1, 1, 1, 1)),
    "rexnet": Tiny("rexnet_100", 64),
    "selecsls": Tiny("selecsls42", 64),
    "senet": Tiny("legacy_seresnet18", 64, layers=(1, 1, 1, 1)),
    "sequencer": Tiny(
        "sequencer2d_s", 64, fixed=True, layers=(1, 1, 1, 1), embed_dims=(64, 64, 64, 64), hidden_sizes=(16, 16, 16, 16)
    ),
    "shvit": Tiny("SHViT", 64, depth=(1, 1, 1), types=("i", "s", "s")),
    "sknet": Tiny("skresnet18", 64, layers=(1, 1, 1, 1)),
    "starnet": Tiny("starnet_s050", 64, depths=(1, 1, 1, 1)),
    "swiftformer": Tiny("swiftformer_xs", 64, fixed=True, layers=(1, 1, 1, 1)),
    "swin_transformer": Tiny(
        "swin_tiny_patch4_window7_224", 64, fixed=True, depths=(1, 2, 1, 1), embed_dim=32, num_heads=(2, 4, 4, 4)
    ),
    "swin_transformer_v2": Tiny(
        "swinv2_tiny_window8_256", 64, fixed=True, depths=(1, 2, 1, 1), embed_dim=32, num_heads=(2, 4, 4, 4)
    ),
    "swin_transformer_v2_cr": Tiny(
        "swinv2_cr_tiny_224", 64, fixed=True, depths=(1, 2, 1, 1), embed_dim=32, num_heads=(2, 4, 4, 4)
    ),
    "tiny_vit": Tiny("tiny_vit_5m_224", 64, depths=(1, 1, 1, 1)),
    "tnt": Tiny("tnt_s_patch16_224", 64, fixed=True, depth=2, embed_dim=96, num_heads_outer=4),
    "tresnet": Tiny("tresnet_m", 64, layers=(1, 1, 1, 1)),
    "twins": Tiny("twins_svt_small", 64, fixed=True, depths=(1, 1, 2, 1), embed_dims=(32, 32, 64, 64)),
    "vgg": Tiny("vgg11", 64, mlp_ratio=0.01),
    "visformer": Tiny("visformer_tiny", 64, fixed=True, depth=(1, 1, 1)),
    "vision_transformer": Tiny("test_vit", 64, fixed=True),
    "vision_transformer_hybrid": Tiny("vit_tiny_r_s16_p8_224", 128, fixed=True, **TRANSFORMER),
    "vision_transformer_relpos": Tiny("test_vit_relpos", 64, fixed=True),
    "vision_transformer_sam": Tiny("samvit_base_patch16_224", 128, fixed=True, **TRANSFORMER, global_attn_indexes=(1,)),
    "vitamin": Tiny("vitamin_small_224", 64, fixed=True),
    "volo": Tiny("VOLO", 64, fixed=True, layers=(1, 1, 1, 1), embed_dims=(64, 64, 64, 64), num_heads=(4, 4, 4, 4)),
    "vovnet": Tiny("ese_vovnet19b_slim_dw", 64),
    "xception": Tiny("legacy_xception", 64),
    "xception_aligned": Tiny("xception41p", 64),
    "xcit": Tiny("xcit_nano_12_p8_224", 128, fixed=True, **TRANSFORMER),
}


def models() -> dict[str, str]:
    """Every family, as ``timm/FAMILY``, and the model that stands for it."""
    if _timm is None:
        return {}
    return {f"timm/{family}": _choice(family).name for family in _timm.list_modules()}


def _choice(family: str) -> Tiny:
    return FAMILIES.get(family) or Tiny(_timm.list_models(module=family)[0], 224)


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
