"""The other side of `ocelli probe --protocol linear-dino`: DINO's own linear probe on the CPU, on the same backbone and
shards.

Training, validation and the classifier are those of `eval_linear.py` in a checkout of DINO's code, which is imported and
not changed; this script stands in for its GPU, its folders of images and its size of 224 px. The backbone is a vision
transformer that `ocelli export` has written, in DINO's `vision_transformer.py`. Images of the backbone's size are taken as
they are for validation, as `ocelli probe` takes them. Needs torch, torchvision and safetensors.

    git clone https://github.com/facebookresearch/dino
    ocelli export --checkpoint runs/mine --out backbone.safetensors
    python scripts/bench/peer_linear.py --dino dino --backbone backbone.safetensors \
        --train 'cifar/train-*.tar' --test 'cifar/test-*.tar'
"""

import argparse
import json
import sys
import time
from functools import partial
from types import SimpleNamespace

import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T

from peer_data import MEAN, STD, Labeled


def without_gpu():
    """What the code says to a GPU goes to the CPU."""
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.synchronize = lambda *_: None


def backbone(path, vision_transformer):
    """The backbone in `path`, and the size of its images."""
    with safe_open(path, "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}
        model = json.loads(file.metadata()["ocelli.model"])
    if model["arch"] != "vit":
        raise SystemExit("only vision transformers: DINO takes the class tokens of the last blocks")
    network = vision_transformer.VisionTransformer(
        img_size=[model["image_px"]],
        patch_size=model["patch_px"],
        embed_dim=model["width"],
        depth=model["depth"],
        num_heads=model["heads"],
        mlp_ratio=model.get("mlp_ratio", 4.0),
        qkv_bias=True,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )
    network.load_state_dict(weights, strict=True)
    return network.eval(), model["image_px"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dino", required=True, help="a checkout of DINO's code")
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--average", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    sys.path.insert(0, args.dino)
    import eval_linear
    import vision_transformer

    without_gpu()
    torch.manual_seed(args.seed)
    eval_linear.args = SimpleNamespace(arch="vit")
    network, size_px = backbone(args.backbone, vision_transformer)
    normalize = [T.ToTensor(), T.Normalize(MEAN, STD)]
    cropped = T.Compose([T.RandomResizedCrop(size_px), T.RandomHorizontalFlip(), *normalize])
    train, test = Labeled(args.train, cropped), Labeled(args.test, T.Compose(normalize))
    n_classes = len(set(train.labels))
    width = network.embed_dim * (args.levels + int(args.average))
    # Without a GPU, DataParallel hands on; the code asks for its `module`.
    classifier = nn.DataParallel(eval_linear.LinearClassifier(width, num_labels=n_classes))
    optimizer = torch.optim.SGD(classifier.parameters(), args.lr * args.batch / 256, momentum=0.9, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs, eta_min=0)
    batches = DataLoader(train, args.batch, shuffle=True, num_workers=args.workers, persistent_workers=args.workers > 0)
    held_out = DataLoader(test, args.batch)
    start, best = time.time(), 0.0
    for epoch in range(args.epochs):
        eval_linear.train(network, classifier, optimizer, batches, epoch, args.levels, args.average)
        scheduler.step()
        if epoch % 10 == 9 or epoch == args.epochs - 1:
            accuracy = eval_linear.validate_network(held_out, network, classifier, args.levels, args.average)["acc1"]
            best = max(best, accuracy)
    print(json.dumps({"epochs": args.epochs, "seconds": time.time() - start, "last": accuracy, "best": best}))


if __name__ == "__main__":
    main()
