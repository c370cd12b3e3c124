"""Objectives of the small recipes in PyTorch: DINO, LeJEPA, MoCo v3, MAE and I-JEPA written out; SimCLR,
SwAV, BYOL, Barlow Twins and VICReg with lightly's losses.

A method has `trained`, the modules under gradients; `scored`, the backbone that k-NN looks at; `loss(step, groups)`
of views [B, V, C, H, W] by size, with embeddings [V*B, D] of the first size; `before_update(step)`, when gradients are
there; and `after(step)`, after the optimizer's step.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from peer_networks import Decoder, DinoHead, build, projection, take


def flat(groups):
    """Views [V*B, C, H, W] of every size."""
    return [g.transpose(0, 1).flatten(0, 1) for g in groups]


def targets(logits, center, temp, centering):
    """Teacher probabilities of `logits` [V, B, K]."""
    if centering == "mean":
        return ((logits - center) / temp).softmax(-1)
    v, b, k = logits.shape
    q = ((logits - logits.max()) / temp).exp().clamp_min(1e-30).reshape(v * b, k)
    for _ in range(3):
        q = q / (q.sum(0) * (k / (v * b)))
        q = q / q.sum(1, keepdim=True)
    return q.reshape(v, b, k)


def koleo(x):
    """Mean negative logarithm of the distance to the nearest neighbor, `x` [B, D]."""
    x = F.normalize(x, dim=-1)
    with torch.no_grad():
        nearest = (x @ x.T).fill_diagonal_(-1).argmax(1)
    return -(F.pairwise_distance(x, x[nearest], eps=1e-8) + 1e-8).log().mean()


class Dino:
    KEYS = (
        "name prototypes head_hidden head_bottleneck head_init_std freeze_last_layer teacher_temp teacher_temp_warmup"
        " teacher_decay student_temp centering center_decay koleo_weight"
    )

    def __init__(self, recipe, clock):
        self.method = recipe["method"]
        backbone, width = build(recipe["model"])
        self.trained = nn.ModuleList([backbone, DinoHead(width, self.method)])
        self.teacher = copy.deepcopy(self.trained).requires_grad_(False)
        self.scored = self.teacher[0]
        self.center = torch.zeros(self.method["prototypes"])
        self.decay = clock.cosine(*self.method.get("teacher_decay", (0.996, 1.0)))
        self.temps, self.temp_ramp = self.method["teacher_temp"], clock.steps_of(self.method["teacher_temp_warmup"])
        self.frozen = clock.steps_of(self.method.get("freeze_last_layer", {"epochs": 1}))

    def temp(self, step):
        low, high = self.temps
        return high if step >= self.temp_ramp else low + (high - low) * step / self.temp_ramp

    def loss(self, step, groups):
        method, x, views = self.method, flat(groups), [g.shape[1] for g in groups]
        with torch.no_grad():
            self.logits = self.teacher[1](self.teacher[0](x[0])).unflatten(0, (views[0], -1))
            probs = targets(self.logits, self.center, self.temp(step), method.get("centering", "mean"))
        embeddings = [self.trained[0](x) for x in x]
        log_probs = torch.cat([
            F.log_softmax(self.trained[1](e) / method.get("student_temp", 0.1), -1).unflatten(0, (v, -1))
            for e, v in zip(embeddings, views)
        ])
        pairs = [(i, j) for i in range(len(probs)) for j in range(len(log_probs)) if i != j]
        loss = -sum((probs[i] * log_probs[j]).sum(-1).mean() for i, j in pairs) / len(pairs)
        if weight := method.get("koleo_weight", 0.0):
            loss = loss + weight * sum(koleo(view) for view in embeddings[0].unflatten(0, (views[0], -1)))
        return loss, embeddings[0]

    def before_update(self, step):
        if step < self.frozen:
            self.trained[1].prototypes.grad = None

    @torch.no_grad()
    def after(self, step):
        d, c = self.decay(step), self.method.get("center_decay", 0.9)
        for t, s in zip(self.teacher.parameters(), self.trained.parameters()):
            t.mul_(d).add_(s, alpha=1 - d)
        self.center = self.center * c + self.logits.mean((0, 1)) * (1 - c)


class WithoutTeacher:
    def __init__(self, recipe, clock):
        self.method = recipe["method"]
        self.scored, width = build(recipe["model"])
        self.trained = nn.ModuleList([self.scored, projection(width, self.method)])

    def embed(self, groups):
        """Embeddings [V, B, Z] of all views, and what the backbone makes of those of the first size."""
        embeddings = [self.scored(x) for x in flat(groups)]
        # Statistics of the head are over views of all sizes, as in the authors' code.
        z = self.trained[1](torch.cat(embeddings)).unflatten(0, (sum(g.shape[1] for g in groups), -1))
        return z, embeddings[0]

    def before_update(self, step):
        pass

    def after(self, step):
        pass


class SimClr(WithoutTeacher):
    KEYS = "name temperature head_hidden head_output head_batch_norm"

    def __init__(self, recipe, clock):
        from lightly.loss import NTXentLoss

        super().__init__(recipe, clock)
        self.contrast = NTXentLoss(self.method.get("temperature", 0.1))

    def loss(self, step, groups):
        z, embeddings = self.embed(groups)
        return self.contrast(z[0], z[1]), embeddings


class Swav(WithoutTeacher):
    KEYS = "name prototypes head_hidden head_output head_batch_norm temperature epsilon sinkhorn_iterations freeze_prototypes"

    def __init__(self, recipe, clock):
        from lightly.loss import SwaVLoss

        recipe["method"].setdefault("head_batch_norm", True)
        super().__init__(recipe, clock)
        m = self.method
        # lightly's own prototypes have a bias; the paper's have none.
        self.prototypes = nn.Linear(m["head_output"], m["prototypes"], bias=False)
        self.trained.append(self.prototypes)
        self.swap = SwaVLoss(m.get("temperature", 0.1), m.get("sinkhorn_iterations", 3), m.get("epsilon", 0.05))
        self.frozen = clock.steps_of(m.get("freeze_prototypes", {"steps": 313}))

    def loss(self, step, groups):
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight))
        z, embeddings = self.embed(groups)
        scores = list(self.prototypes(F.normalize(z, dim=-1)))
        n_global = groups[0].shape[1]
        return self.swap(scores[:n_global], scores[n_global:]).squeeze(), embeddings

    def before_update(self, step):
        if step < self.frozen:
            self.prototypes.weight.grad = None


class LeJepa(WithoutTeacher):
    """The formulas of the paper; the minimal example of its authors has the same, centered on all views."""

    KEYS = "name sigreg_weight directions center head_hidden head_output head_batch_norm"

    def __init__(self, recipe, clock):
        recipe["method"].setdefault("head_batch_norm", True)
        super().__init__(recipe, clock)
        self.t = torch.linspace(0, 3, 17)
        weights = torch.full((17,), 2 * (3 / 16))
        weights[[0, -1]] = 3 / 16
        self.normal = (-self.t.square() / 2).exp()
        self.weights = weights * self.normal

    def sigreg(self, z):
        """How far embeddings `z` [V, B, Z] are from standard normals, views by themselves."""
        a = F.normalize(torch.randn(z.shape[-1], self.method.get("directions", 256)), dim=0)
        waves = (z @ a).unsqueeze(-1) * self.t
        error = (waves.cos().mean(1) - self.normal).square() + waves.sin().mean(1).square()
        return z.shape[1] * (error @ self.weights).mean()

    def loss(self, step, groups):
        z, embeddings = self.embed(groups)
        n_center = len(z) if self.method.get("center", "global") == "all" else groups[0].shape[1]
        agreement = (z - z[:n_center].mean(0)).square().mean()
        weight = self.method.get("sigreg_weight", 0.02)
        return (1 - weight) * agreement + weight * self.sigreg(z), embeddings


def perceptron(width, hidden, output, output_norm):
    """Linear layers without biases, with normalization and rectifiers between them."""
    layers, widths = [], [width, *hidden, output]
    for i, (a, b) in enumerate(zip(widths, widths[1:])):
        layers.append(nn.Linear(a, b, bias=False))
        if i + 2 < len(widths):
            layers += [nn.BatchNorm1d(b), nn.ReLU(inplace=True)]
        elif output_norm:
            layers.append(nn.BatchNorm1d(b, affine=False))
    return nn.Sequential(*layers)


class MocoV3:
    """Every view by itself, as in the paper's algorithm 1, so that statistics are those of one view."""

    KEYS = "name temperature momentum projector_hidden predictor_hidden output predictor_output_norm"

    def __init__(self, recipe, clock):
        self.method = m = recipe["method"]
        self.scored, width = build(recipe["model"])
        base = nn.Sequential(self.scored, perceptron(width, m["projector_hidden"], m["output"], True))
        predictor = perceptron(m["output"], m["predictor_hidden"], m["output"], m.get("predictor_output_norm", True))
        self.trained = nn.ModuleList([base, predictor])
        self.momentum = copy.deepcopy(base).requires_grad_(False)
        self.decay = clock.cosine(*m.get("momentum", (0.99, 1.0)))

    def loss(self, step, groups):
        # Views of one size are one tensor here.
        views, t = list(groups[0].unbind(1)), self.method.get("temperature", 0.2)
        with torch.no_grad():
            d = self.decay(step)
            for a, b in zip(self.momentum.parameters(), self.trained[0].parameters()):
                a.mul_(d).add_(b, alpha=1 - d)
            keys = [F.normalize(self.momentum(x), dim=-1) for x in views]
        embeddings = [self.trained[0][0](x) for x in views]
        queries = [F.normalize(self.trained[1](self.trained[0][1](e)), dim=-1) for e in embeddings]
        own = torch.arange(len(keys[0]))
        pairs = [(queries[0], keys[1]), (queries[1], keys[0])]
        return sum(2 * t * F.cross_entropy(q @ k.T / t, own) for q, k in pairs), torch.cat(embeddings)

    def before_update(self, step):
        pass

    def after(self, step):
        pass


class Byol:
    """Every view by itself, as in the authors' code."""

    KEYS = "name target_decay projector_hidden predictor_hidden output"

    def __init__(self, recipe, clock):
        from lightly.loss import NegativeCosineSimilarity

        self.method = m = recipe["method"]
        self.scored, width = build(recipe["model"])
        hidden, output = m.get("projector_hidden", [4096]), m.get("output", 256)
        online = nn.Sequential(self.scored, perceptron(width, hidden, output, False))
        predictor = perceptron(output, m.get("predictor_hidden", [4096]), output, False)
        self.trained = nn.ModuleList([online, predictor])
        self.target = copy.deepcopy(online).requires_grad_(False)
        self.decay = clock.cosine(*m.get("target_decay", (0.996, 1.0)))
        self.similarity = NegativeCosineSimilarity()

    def loss(self, step, groups):
        # Views of one size are one tensor here.
        views = list(groups[0].unbind(1))
        with torch.no_grad():
            targets = [self.target(x) for x in views]
        embeddings = [self.trained[0][0](x) for x in views]
        predictions = [self.trained[1](self.trained[0][1](e)) for e in embeddings]
        pairs = [(predictions[0], targets[1]), (predictions[1], targets[0])]
        return sum(2 + 2 * self.similarity(q, z) for q, z in pairs), torch.cat(embeddings)

    def before_update(self, step):
        pass

    @torch.no_grad()
    def after(self, step):
        d = self.decay(step)
        for t, s in zip(self.target.parameters(), self.trained[0].parameters()):
            t.mul_(d).add_(s, alpha=1 - d)


class TwoViews:
    """A network without a teacher, which sees every view by itself."""

    def __init__(self, recipe, clock):
        self.method = m = recipe["method"]
        self.scored, width = build(recipe["model"])
        projector = perceptron(width, m.get("projector_hidden", [8192, 8192]), m.get("output", 8192), False)
        self.trained = nn.ModuleList([self.scored, projector])

    def embed(self, groups):
        """Embeddings [B, Z] of both views, and what the backbone makes of them."""
        embeddings = [self.scored(x) for x in groups[0].unbind(1)]
        return [self.trained[1](e) for e in embeddings], torch.cat(embeddings)

    def before_update(self, step):
        pass

    def after(self, step):
        pass


class BarlowTwins(TwoViews):
    KEYS = "name redundancy_weight loss_scale projector_hidden output"

    def __init__(self, recipe, clock):
        from lightly.loss import BarlowTwinsLoss

        super().__init__(recipe, clock)
        self.twins = BarlowTwinsLoss(self.method.get("redundancy_weight", 0.0051))

    def loss(self, step, groups):
        z, embeddings = self.embed(groups)
        return self.method.get("loss_scale", 1.0) * self.twins(*z), embeddings


class VicReg(TwoViews):
    KEYS = "name invariance_weight variance_weight covariance_weight projector_hidden output"

    def __init__(self, recipe, clock):
        from lightly.loss import VICRegLoss

        super().__init__(recipe, clock)
        m = self.method
        self.terms = VICRegLoss(
            m.get("invariance_weight", 25.0), m.get("variance_weight", 25.0), m.get("covariance_weight", 1.0))

    def loss(self, step, groups):
        z, embeddings = self.embed(groups)
        return self.terms(*z), embeddings


class Mae:
    """Pixels of the patches that the encoder does not see."""

    KEYS = "name mask_ratio decoder_width decoder_depth decoder_heads normalize_pixels"

    def __init__(self, recipe, clock):
        self.method, model = recipe["method"], recipe["model"]
        m, self.patch_px = self.method, model["patch_px"]
        self.scored, _ = build(model)
        output = 3 * self.patch_px**2
        sizes = m.get("decoder_width", 512), m.get("decoder_depth", 8), m.get("decoder_heads", 16)
        decoder = Decoder(model, {"initialization": "xavier"}, *sizes, output)
        self.trained = nn.ModuleList([self.scored, decoder])

    def loss(self, step, groups):
        x = flat(groups)[0]
        pixels = F.unfold(x, self.patch_px, stride=self.patch_px).transpose(1, 2)
        b, n, _ = pixels.shape
        n_visible = int(n * (1 - self.method.get("mask_ratio", 0.75)))
        visible, masked = torch.rand(b, n).argsort(1).tensor_split([n_visible], 1)
        tokens = self.scored.tokens(x, visible)
        target = take(pixels, masked)
        if self.method.get("normalize_pixels", True):
            mean, var = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
            target = (target - mean) / (var + 1e-6).sqrt()
        return F.mse_loss(self.trained[1](tokens, visible, masked), target), tokens[:, 0]

    def before_update(self, step):
        pass

    def after(self, step):
        pass


class Blocks:
    """Cells of target blocks and contexts on a square grid, as I-JEPA's code draws them."""

    def __init__(self, m, side):
        self.side, self.n_targets, self.min_context = side, m.get("target_blocks", 4), m.get("min_context", 10)
        self.target_scale, self.aspect = m.get("target_scale", (0.15, 0.2)), m.get("target_aspect", (0.75, 1.5))
        self.context_scale = m.get("context_scale", (0.85, 1.0))

    def size(self, scale, aspect):
        """Sides of the blocks of a batch: one random number decides area and aspect."""
        share = torch.rand(()).item()
        area = int(self.side**2 * (scale[0] + share * (scale[1] - scale[0])))
        ratio = aspect[0] + share * (aspect[1] - aspect[0])
        return min(round(math.sqrt(area * ratio)), self.side - 1), min(round(math.sqrt(area / ratio)), self.side - 1)

    def place(self, h, w):
        """A block as a mask. The last row and column that it could reach are left out, as in the code."""
        top, left = torch.randint(self.side - h, ()), torch.randint(self.side - w, ())
        mask = torch.zeros(self.side, self.side, dtype=torch.bool)
        mask[top:top + h, left:left + w] = True
        return mask.flatten()

    def context(self, size, targets):
        """A block without those of the targets, fewer of them after every twenty blocks that are too small."""
        for tries in range(20 * (len(targets) + 1)):
            mask = self.place(*size)
            for target in targets[:len(targets) - tries // 20]:
                mask &= ~target
            if mask.sum() > self.min_context:
                return mask
        raise SystemExit("method.min_context is too large for this grid")

    def batch(self, n):
        """Visible cells `[B, n]`, filled up with cell 0 to as many as the largest context has, `[B, n]` which of them are visible,
        and cells of the targets, `[B, m]` each. The official code cuts contexts to as many cells as the smallest has."""
        target_size, context_size = self.size(self.target_scale, self.aspect), self.size(self.context_scale, (1, 1))
        contexts, targets = [], []
        for _ in range(n):
            masks = [self.place(*target_size) for _ in range(self.n_targets)]
            contexts.append(self.context(context_size, masks).nonzero().squeeze(1))
            targets.append([mask.nonzero().squeeze(1) for mask in masks])
        visible = nn.utils.rnn.pad_sequence(contexts, batch_first=True)
        is_visible = nn.utils.rnn.pad_sequence([torch.ones_like(cells, dtype=torch.bool) for cells in contexts], batch_first=True)
        return visible, is_visible, [torch.stack(cells) for cells in zip(*targets)]


class Ijepa:
    """Features of blocks that an average of the network has, from what the network sees around them."""

    KEYS = "name predictor_width predictor_depth predictor_heads predictor_init_std target_blocks target_scale target_aspect context_scale min_context teacher_decay"

    def __init__(self, recipe, clock):
        m, model = recipe["method"], recipe["model"]
        context, width = build(model)
        init = {"init_std": m.get("predictor_init_std", 0.02)}
        sizes = m.get("predictor_width", 384), m.get("predictor_depth", 6), m.get("predictor_heads", 6)
        predictor = Decoder(model, init, *sizes, width)
        self.trained = nn.ModuleList([context, predictor])
        self.scored = copy.deepcopy(context).requires_grad_(False)
        self.decay, self.total = m.get("teacher_decay", (0.996, 1.0)), clock.total
        self.blocks = Blocks(m, context.grid)

    def loss(self, step, groups):
        x = flat(groups)[0]
        visible, is_visible, targets = self.blocks.batch(len(x))
        with torch.no_grad():
            features = self.scored.tokens(x)
            features = F.layer_norm(features, features.shape[-1:])
            wanted = torch.cat([take(features, cells) for cells in targets])
        tokens = self.trained[0].tokens(x, visible, is_visible)
        n = len(targets)
        found = self.trained[1](tokens.repeat(n, 1, 1), visible.repeat(n, 1), torch.cat(targets), is_visible.repeat(n, 1))
        shares = is_visible / is_visible.sum(1, keepdim=True)
        return F.smooth_l1_loss(found, wanted), (tokens * shares.unsqueeze(-1)).sum(1)

    def before_update(self, step):
        pass

    @torch.no_grad()
    def after(self, step):
        d = self.decay[0] + (self.decay[1] - self.decay[0]) * step / self.total
        for t, s in zip(self.scored.parameters(), self.trained[0].parameters()):
            t.mul_(d).add_(s, alpha=1 - d)


METHODS = {
    "dino": Dino, "simclr": SimClr, "swav": Swav, "lejepa": LeJepa, "moco_v3": MocoV3, "byol": Byol,
    "barlow_twins": BarlowTwins, "vicreg": VicReg, "mae": Mae, "ijepa": Ijepa,
}
