"""Weights in and out of other libraries, through the libraries themselves.

    libraries.py images FOLDER          PNGs of noise, 32 px
    libraries.py make FOLDER            random networks of every library, and their features of FOLDER/images
    libraries.py check FORMAT PATH FEATURES IMAGES
                                        the features of an export beside those of `ocelli embed`
    libraries.py onnx PATH FEATURES IMAGES
                                        the same for a graph, with onnxruntime alone
    libraries.py scores FEATURES WEIGHTS OUT
                                        the scores of the classifier in a .safetensors of Ocelli for FEATURES
    libraries.py classify FORMAT PATH SCORES WEIGHTS IMAGES
                                        the scores and classes of an exported classifier beside those of WEIGHTS
    libraries.py predict FOLDER GRAPH IMAGES EVALUATIONS
                                        the predictions of a trained classifier, exported for transformers and as a graph
                                        with probabilities, beside those in a file of evaluations
    libraries.py decode PATH BACKBONE WEIGHTS IMAGES OUT
                                        the scores of pixels of a graph beside the decoder of WEIGHTS in torch, on the
                                        patches of the graph BACKBONE; those of the first image are written to OUT
"""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np

PX = 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def png(path, pixels):
    """Writes [H, W, 3] bytes without a library for images."""
    import struct
    import zlib

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + pixels[y].tobytes() for y in range(height))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def unpng(path):
    """Reads what `png` has written."""
    import zlib

    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(PX, 1 + 3 * PX)
    return rows[:, 1:].reshape(PX, PX, 3)


def make_images(folder):
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for i in range(5):
        png(folder / f"{i}.png", random.integers(0, 256, (PX, PX, 3), np.uint8))


def pixels(folder, mean=MEAN, std=STD):
    """[B, 3, H, W] as networks see them, in the order of the names."""
    images = np.stack([unpng(path) for path in sorted(folder.glob("*.png"))])
    values = (images / 255.0 - np.array(mean)) / np.array(std)
    return values.transpose(0, 3, 1, 2).astype(np.float32)


def close(what, ours, theirs, tolerance=1e-5):
    scale = np.abs(theirs).max()
    gap = np.abs(ours - theirs).max() / scale
    print(f"{what}: {gap:.1e} of the largest value")
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    assert scale > 1e-3, f"{what}: features are zero"
    assert gap <= tolerance, f"{what}: {gap}"


def shaken(model, seed):
    """Every parameter and statistic drawn anew: nothing is left at zero or one."""
    import torch

    torch.manual_seed(seed)
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        if name.endswith("running_var"):
            value.uniform_(0.5, 1.5)
        elif value.ndim >= 2 and "token" not in name and "pos" not in name and "scale" not in name:
            value.normal_(0, (2.0 / value[0].numel()) ** 0.5)
        else:
            value.add_(0.1 * torch.randn_like(value))
    return model.eval()


def features(kind, model, x):
    """One vector an image, of any library's model."""
    import torch

    with torch.no_grad():
        if kind == "timm":
            return model(x).numpy()
        if kind == "transformers":
            out = model(pixel_values=x).last_hidden_state
            return (out[:, 0] if out.ndim == 3 else out.mean((2, 3))).numpy()
        if hasattr(model, "heads"):
            model.heads = torch.nn.Identity()
        elif hasattr(model, "fc"):
            model.fc = torch.nn.Identity()
        elif hasattr(model, "classifier"):
            model.classifier[-1] = torch.nn.Identity()
        return model(x).numpy()


def networks():
    """Small random networks: name, kind, model, what `ocelli` must be told."""
    import timm
    import torchvision
    import transformers

    vit = dict(img_size=PX, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=0)
    yield "timm-vit", "timm", timm.create_model("vit_small_patch16_224", **vit), ["--heads", "2"]
    # A network for larger images: its position embedding is resampled for these.
    larger = dict(vit, img_size=48, dynamic_img_size=True)
    yield "timm-resampled", "timm", timm.create_model("vit_small_patch16_224", **larger), ["--heads", "2"]
    registers = dict(vit, reg_tokens=3, init_values=0.1)
    yield "timm-registers", "timm", timm.create_model("vit_small_patch14_reg4_dinov2", **registers), ["--heads", "2"]
    gated = dict(vit, init_values=0.1, mlp_ratio=5.5)
    yield "timm-gated", "timm", timm.create_model("vit_giant_patch14_dinov2", **gated), ["--heads", "2"]
    rotary = dict(vit, init_values=0.1, num_reg_tokens=2, global_pool="token")
    for name in ("", "_qkvb"):
        yield f"timm-dinov3{name}", "timm", timm.create_model(f"vit_small_patch16_dinov3{name}", **rotary), ["--heads", "2"]
    plus = timm.create_model("vit_small_plus_patch16_dinov3_qkvb", **rotary)
    yield "timm-dinov3-gated", "timm", plus, ["--heads", "2"]
    yield "timm-resnet", "timm", timm.create_model("resnet26", num_classes=0), []
    yield "timm-regnet", "timm", timm.create_model("regnety_002", num_classes=0), []
    # Narrower in timm and in the paper than in torchvision.
    yield "timm-regnet-800", "timm", timm.create_model("regnety_008", num_classes=0), []
    yield "tv-resnet", "torchvision", torchvision.models.resnet18(), []
    yield "tv-regnet", "torchvision", torchvision.models.regnet_y_400mf(), []
    yield "tv-regnet-800", "torchvision", torchvision.models.regnet_y_800mf(), []
    depths, widths = [1, 1, 2, 1], [16, 32, 64, 128]
    sizes = dict(depths=depths, dims=widths, num_classes=0)
    yield "timm-convnext", "timm", timm.create_model("convnext_tiny", **sizes), []
    # A last grid of more than one cell.
    yield "timm-convnext-fine", "timm", timm.create_model("convnext_tiny", **sizes, patch_size=1), []
    blocks = [torchvision.models.convnext.CNBlockConfig(*sizes) for sizes in zip(widths, widths[1:] + [None], depths)]
    yield "tv-convnext", "torchvision", torchvision.models.ConvNeXt(blocks), []
    net = transformers.DINOv3ConvNextConfig(hidden_sizes=widths, depths=depths)
    yield "hf-convnext", "transformers", transformers.DINOv3ConvNextModel(net), []
    config = dict(image_size=PX, patch_size=8, num_layers=2, num_heads=2, hidden_dim=64, mlp_dim=128)
    yield "tv-vit", "torchvision", torchvision.models.VisionTransformer(**config), ["--heads", "2"]
    config = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=PX, patch_size=8)
    vit = transformers.ViTConfig(**config, intermediate_size=128)
    yield "hf-vit", "transformers", transformers.ViTModel(vit, add_pooling_layer=False), []
    vit = transformers.Dinov2Config(**config)
    yield "hf-dinov2", "transformers", transformers.Dinov2Model(vit), []
    vit = transformers.Dinov2WithRegistersConfig(**config, use_swiglu_ffn=True, num_register_tokens=2)
    yield "hf-registers", "transformers", transformers.Dinov2WithRegistersModel(vit), []
    for gated in (False, True):
        vit = transformers.DINOv3ViTConfig(**config, intermediate_size=128, num_register_tokens=2, use_gated_mlp=gated,
                                           hidden_act="silu" if gated else "gelu")
        yield "hf-dinov3" + "-gated" * gated, "transformers", transformers.DINOv3ViTModel(vit), []
    net = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], layer_type="basic")
    yield "hf-resnet", "transformers", transformers.ResNetModel(net), []
    net = transformers.RegNetConfig(embedding_size=32, hidden_sizes=[24, 56, 152, 368], depths=[1, 1, 4, 7], groups_width=8)
    yield "hf-regnet", "transformers", transformers.RegNetModel(net), []


def dinov2_names(state):
    """timm's names of a network without registers as DINOv2's code has them."""
    renamed = {name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): value for name, value in state.items()}
    return renamed | {"mask_token": renamed["cls_token"][0] * 0}


def dinov3_names(state):
    """The names of a network with rotary positions in DINOv3's code, with its constants, from timm's."""
    import torch

    renamed = {}
    for name, value in state.items():
        if name.endswith("_bias"):
            continue
        name = name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma").replace("reg_token", "storage_tokens")
        renamed[name.replace("fc1_g", "w1").replace("fc1_x", "w2").replace("mlp.fc2", "mlp.w3" if "blocks.0.mlp.fc1_g.weight" in state
                                                                           else "mlp.fc2")] = value
    for block in range(2):
        q, v = (state[f"blocks.{block}.attn.{part}_bias"] for part in "qv")
        # What the mask hides is of no meaning.
        renamed[f"blocks.{block}.attn.qkv.bias"] = torch.cat([q, q + 1, v])
        renamed[f"blocks.{block}.attn.qkv.bias_mask"] = torch.cat([q * 0 + 1, q * 0, v * 0 + 1])
    return renamed | {"mask_token": renamed["cls_token"][0] * 0, "rope_embed.periods": 100 ** (torch.arange(8) / 8)}


def dinov3_convnext_names(state):
    """The names of a ConvNeXt in DINOv3's code, which holds its last norm twice, from timm's."""
    renamed = {}
    for name, value in state.items():
        name = re.sub(r"^stem\.", "downsample_layers.0.", name)
        name = re.sub(r"^stages\.(\d)\.downsample", r"downsample_layers.\1", name)
        name = name.replace("blocks.", "").replace("conv_dw", "dwconv").replace("mlp.fc", "pwconv").replace("head.norm", "norm")
        renamed[name] = value
    return renamed | {f"norms.3.{part}": renamed[f"norm.{part}"] for part in ("weight", "bias")}


def make(folder):
    import torch
    from safetensors.torch import save_file

    x = torch.from_numpy(pixels(folder / "images"))
    said = {}
    for seed, (name, kind, model, flags) in enumerate(networks()):
        model = shaken(model, seed)
        state = {key: value.contiguous() for key, value in model.state_dict().items()}
        if kind == "transformers":
            model.save_pretrained(folder / name)
            path, state_path = folder / name, folder / f"{name}-memory.pth"
            torch.save(model.state_dict(), state_path)
            eps = getattr(model.config, "layer_norm_eps", None)
            heads = getattr(model.config, "num_attention_heads", None)
            if eps != 1e-12 or name != "hf-vit":
                said[f"{name}-memory"] = (str(state_path), ["--heads", str(heads)] if heads else [])
        elif kind == "torchvision":
            path = folder / f"{name}.pth"
            torch.save(model.state_dict(), path)
        else:
            path = folder / f"{name}.safetensors"
            save_file(state, path)
        expected = features(kind, model, x)
        np.save(folder / f"{name}.npy", expected)
        if f"{name}-memory" in said:
            np.save(folder / f"{name}-memory.npy", expected)
        said[name] = (str(path), flags)
        if name == "timm-vit":
            # A training checkpoint of DINO: two networks with heads, and settings.
            import argparse

            wrapped = {f"module.backbone.{key}": value for key, value in state.items()}
            other = {key: value + 1 for key, value in wrapped.items()}
            whole = {"student": other, "teacher": wrapped, "args": argparse.Namespace(lr=1.0), "epoch": 3}
            torch.save(whole, folder / "dino.pth")
            said["dino"] = (str(folder / "dino.pth"), ["--heads", "2"])
            np.save(folder / "dino.npy", expected)
        if name in ("timm-dinov3_qkvb", "timm-dinov3-gated"):
            plain = name.replace("timm-", "").replace("_qkvb", "")
            torch.save(dinov3_names(state), folder / f"hub-{plain}.pth")
            said[f"hub-{plain}"] = (str(folder / f"hub-{plain}.pth"), ["--heads", "2"])
            np.save(folder / f"hub-{plain}.npy", expected)
        if name == "timm-convnext":
            torch.save(dinov3_convnext_names(state), folder / "hub-convnext.pth")
            said["hub-convnext"] = (str(folder / "hub-convnext.pth"), [])
            np.save(folder / "hub-convnext.npy", expected)
        if name == "timm-gated":
            torch.save(dinov2_names(state), folder / "dinov2-gated.pth")
            said["dinov2-gated"] = (str(folder / "dinov2-gated.pth"), ["--heads", "2"])
            np.save(folder / "dinov2-gated.npy", expected)
    make_layouts(folder, x, said)
    (folder / "said.json").write_text(json.dumps(said))


def vissl_names(state):
    """The names of a RegNet in VISSL's checkpoints, from torchvision's."""
    renamed = {}
    for name, value in state.items():
        name = name.replace("stem.", "conv1.stem.", 1) if name.startswith("stem.") else name
        name = re.sub(r"^trunk_output\.block(\d)\.", lambda found: f"res{int(found[1]) + 1}.", name)
        name = name.replace(".proj.0.", ".proj.").replace(".proj.1.", ".bn.")
        name = name.replace("f.se.fc1.", "f.se.excitation.0.").replace("f.se.fc2.", "f.se.excitation.2.")
        name = name.replace("f.c.0.", "f.c.").replace("f.c.1.", "f.final_bn.")
        renamed["_feature_blocks." + name] = value
    return renamed


def make_layouts(folder, x, said):
    """Networks as training programs leave them: wrapped, in a sequence, beside a second one, under other names of files."""
    import timm
    import torch
    import torchvision

    def keep(name, path, flags, expected):
        said[name] = (str(path), flags)
        np.save(folder / f"{name}.npy", expected)

    vit = shaken(timm.create_model("vit_small_patch16_224", img_size=PX, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=0), 70)
    expected = features("timm", vit, x)
    flags = ["--heads", "2"]
    state = vit.state_dict()
    for name in ("weights.ckpt", "weights.pth.tar", "weights.torch", "weights.PTH", "weights"):
        torch.save({"state_dict": state, "epoch": 1}, folder / name)
        keep(f"file-{name}", folder / name, flags, expected)
    torch.save(state, folder / "legacy.pth", _use_new_zipfile_serialization=False)
    keep("legacy", folder / "legacy.pth", flags, expected)
    # The modules of torch.compile, of FSDP and of activation checkpoints.
    for block in range(2):
        vit.blocks[block] = torch.compile(vit.blocks[block])
    wrapped = {f"_fsdp_wrapped_module.{name}".replace("attn.", "_checkpoint_wrapped_module.attn."): value for name, value in vit.state_dict().items()}
    torch.save(wrapped, folder / "wrapped.pt")
    keep("wrapped", folder / "wrapped.pt", flags, expected)
    # Two networks, of which the name chooses one; and one network under two names.
    other = {name: value + 1 for name, value in state.items()}
    both = {f"backbone.{name}": value for name, value in state.items()} | {f"momentum_backbone.{name}": value for name, value in other.items()}
    torch.save(both, folder / "two.pth")
    keep("two", folder / "two.pth", [*flags, "--network", "backbone"], expected)
    shared = {f"{prefix}.{name}": value for prefix in ("model", "network") for name, value in state.items()}
    torch.save(shared, folder / "shared.pth")
    keep("shared", folder / "shared.pth", flags, expected)

    resnet = shaken(torchvision.models.resnet18(), 71)
    sequence = torch.nn.Sequential(*list(resnet.children())[:-1])
    torch.save({"state_dict": {f"backbone.{name}": value for name, value in sequence.state_dict().items()}}, folder / "sequence.ckpt")
    keep("sequence", folder / "sequence.ckpt", [], features("torchvision", resnet, x))
    regnet = shaken(torchvision.models.regnet_y_400mf(), 73)
    trunk = {name: value for name, value in vissl_names(regnet.state_dict()).items() if not name.startswith("_feature_blocks.fc.")}
    whole = {"classy_state_dict": {"base_model": {"model": {"trunk": trunk, "heads": {}}}}, "iteration": 3}
    torch.save(whole, folder / "vissl.torch")
    keep("vissl", folder / "vissl.torch", [], features("torchvision", regnet, x))
    resnet = shaken(torchvision.models.resnet50(), 74)
    trunk = {f"_feature_blocks.{name}": value for name, value in resnet.state_dict().items() if not name.startswith("fc.")}
    torch.save({"classy_state_dict": {"base_model": {"model": {"trunk": trunk, "heads": {}}}}}, folder / "vissl-resnet.torch")
    keep("vissl-resnet", folder / "vissl-resnet.torch", [], features("torchvision", resnet, x))


def check(form, path, features_path, images):
    import torch

    ours = np.load(features_path)
    x = torch.from_numpy(pixels(Path(images)))
    if form == "timm":
        import timm

        model = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
        said = timm.data.resolve_data_config(model=model)
        assert np.allclose(said["mean"], MEAN) and np.allclose(said["std"], STD), said
        theirs = features("timm", model, x)
    elif form == "transformers":
        from transformers import AutoImageProcessor, AutoModel

        model, report = AutoModel.from_pretrained(path, output_loading_info=True)
        strange = [name for name in report["missing_keys"] if "pooler" not in name and "num_batches_tracked" not in name]
        assert not strange and not report["unexpected_keys"], report
        processor = AutoImageProcessor.from_pretrained(path)
        stack = np.stack([unpng(p) for p in sorted(Path(images).glob("*.png"))])
        model.eval()
        # Images of the network's size: only the colors of the processor count.
        seen = processor(list(stack), return_tensors="pt", do_resize=False, do_center_crop=False)["pixel_values"]
        theirs = features("transformers", model, seen)
    else:
        raise SystemExit(f"no such format: {form}")
    close(form, ours, theirs)


def check_onnx(path, features_path, images, tolerance):
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    x = pixels(Path(images))
    embedding, patches = session.run(None, {"pixels": x})
    # The number of images is free.
    one, _ = session.run(None, {"pixels": x[:1]})
    close("onnx", embedding, np.load(features_path), tolerance)
    close("onnx, one image", one, embedding[:1])
    assert patches.ndim == 3 and patches.shape[0] == len(x), patches.shape


def read_tensors(path):
    """The tensors of f32 and the metadata of a .safetensors file, without a library for them."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[start + first : start + end], np.float32).reshape(entry["shape"])
    return tensors, metadata


def scores(features_path, weights, out):
    tensors, _ = read_tensors(weights)
    np.save(out, np.load(features_path) @ tensors["head.weight"].T + tensors["head.bias"])


def classify(form, path, scores_path, weights, images):
    ours = np.load(scores_path)
    classes = json.loads(read_tensors(weights)[1]["ocelli.classes"])
    x = pixels(Path(images))
    if form == "timm":
        import timm
        import torch

        model = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
        names = list(model.pretrained_cfg["label_names"])
        with torch.no_grad():
            theirs = model(torch.from_numpy(x)).numpy()
    elif form == "transformers":
        import torch
        from transformers import AutoModelForImageClassification

        model, report = AutoModelForImageClassification.from_pretrained(path, output_loading_info=True)
        strange = [name for name in report["missing_keys"] if "num_batches_tracked" not in name]
        assert not strange and not report["unexpected_keys"], report
        names = [model.config.id2label[number] for number in range(model.config.num_labels)]
        assert model.config.label2id == {name: number for number, name in enumerate(names)}
        with torch.no_grad():
            theirs = model.eval()(pixel_values=torch.from_numpy(x)).logits.numpy()
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        names = json.loads(session.get_modelmeta().custom_metadata_map["ocelli.classes"])
        (output,) = session.get_outputs()
        (theirs,) = session.run(None, {"pixels": x})
        if output.name == "probabilities":
            ours = np.exp(ours - ours.max(1, keepdims=True))
            ours /= ours.sum(1, keepdims=True)
        else:
            assert output.name == "logits", output.name
    assert names == classes, (names, classes)
    close(form, ours, theirs, 1e-4)


def pixel_scores(decoder, patches, size):
    """Scores [B, classes, H, W] by a decoder in PyTorch, from the patches [B, N, D] of images of `size`, which is H and W."""
    import torch
    from torch.nn import functional as F

    cells = torch.from_numpy(patches)
    stride = math.isqrt(size[0] * size[1] // cells.shape[1])
    grid = size[0] // stride, size[1] // stride
    if "decoder.hidden.conv.weight" in decoder:
        maps = cells.transpose(1, 2).unflatten(2, grid)
        cells = F.conv2d(maps, decoder["decoder.hidden.conv.weight"], padding=1).flatten(2).transpose(1, 2)
        norm = decoder["decoder.hidden.norm.weight"], decoder["decoder.hidden.norm.bias"]
        cells = F.gelu(F.layer_norm(cells, cells.shape[-1:], *norm, 1e-6))
    cells = F.linear(cells, decoder["decoder.scores.weight"], decoder["decoder.scores.bias"])
    maps = cells.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(maps, size=size, mode="bilinear").numpy()


def decode(path, backbone, weights, images, out):
    import onnxruntime
    import torch

    x = pixels(Path(images))
    features = onnxruntime.InferenceSession(backbone)
    session = onnxruntime.InferenceSession(path)
    (output,) = session.get_outputs()
    assert output.name == "logits", output.name
    tensors, metadata = read_tensors(weights)
    names = json.loads(session.get_modelmeta().custom_metadata_map["ocelli.pixel_classes"])
    assert names == json.loads(metadata["ocelli.pixel_classes"]), names
    decoder = {name: torch.from_numpy(tensors[name].copy()) for name in tensors if name.startswith("decoder.")}
    inputs = [x]
    (entry,) = session.get_inputs()
    if not isinstance(entry.shape[2], int):
        # The size is free: with several cells in each direction, and not as many, the order of interpolation counts.
        shape = len(x), x.shape[1], 96, 160
        inputs.append(np.random.default_rng(1).standard_normal(shape, np.float32))
    for seen in inputs:
        _, patches = features.run(None, {"pixels": seen})
        (ours,) = session.run(None, {"pixels": seen})
        close(f"{path}, {seen.shape[2]} x {seen.shape[3]} px", ours, pixel_scores(decoder, patches, seen.shape[2:]), 1e-4)
        if seen is x:
            np.save(out, ours[:1])


def predict(folder, graph, images, evaluations):
    """Compares predictions and their probabilities, image by image, and so the accuracy."""
    import onnxruntime
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    rows = [json.loads(line) for line in Path(evaluations).read_text().splitlines()]
    row = [row for row in rows if row["metric"] == "top1"][-1]
    ours = {image["key"]: image for image in row["details"]["worst"]}
    processor = AutoImageProcessor.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    session = onnxruntime.InferenceSession(graph)
    classes = json.loads(session.get_modelmeta().custom_metadata_map["ocelli.classes"])
    paths = sorted(Path(images).rglob("*.png"))
    assert len(paths) == len(ours) == row["test"]["images"], (len(paths), len(ours), row["test"])
    n_right = [0, 0]
    for path in paths:
        expected = ours[path.relative_to(images).with_suffix("").as_posix()]
        pixel_values = processor(Image.open(path).convert("RGB"), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            theirs = model(pixel_values=pixel_values).logits.softmax(1)[0].numpy()
        (graphs,) = session.run(None, {"pixels": pixel_values.numpy()})
        for i, (probabilities, names) in enumerate([(theirs, model.config.id2label), (graphs[0], classes)]):
            name = names[int(probabilities.argmax())]
            assert name == expected["predicted"], (path, name, expected)
            difference = abs(100 * float(probabilities.max()) - expected["probability"])
            assert difference < 0.05, (path, probabilities, expected)
            n_right[i] += name == path.parent.name
    top1 = [100 * n / len(paths) for n in n_right]
    assert top1 == [row["accuracy"]] * 2, (top1, row["accuracy"])


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "images":
        make_images(Path(rest[0]))
    elif verb == "make":
        make(Path(rest[0]))
    elif verb == "check":
        check(*rest)
    elif verb == "onnx":
        check_onnx(*rest[:3], float(rest[3]) if len(rest) > 3 else 1e-4)
    elif verb == "scores":
        scores(*rest)
    elif verb == "classify":
        classify(*rest)
    elif verb == "predict":
        predict(*rest)
    elif verb == "decode":
        decode(*rest)
    elif verb == "compare":
        close(rest[0], np.load(rest[1]), np.load(rest[2]), float(rest[3]) if len(rest) > 3 else 1e-5)
