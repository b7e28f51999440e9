"""Networks of sets: messages along the edges of a graph, and point clouds whose largest features count."""

from __future__ import annotations

import torch
from torch import nn

from held_out.families.base import MLP_SITES, HeldOutFamily, ResidualMLP, draw_normal, draw_uniform

GRAPHS, NODES, NEIGHBORS, FEATURES, WIDTH = 8, 24, 5, 6, 64
#: edges of each node that are padding
FAKE = 2
CLOUDS, POINTS, SHAPES, CLOUD_WIDTH = 24, 48, 8, 96
#: of a point's place; and the share of clouds with a wrong label, so that the loss does not fall to zero
JITTER, MISLABELED = 0.08, 0.08
Batch = tuple[torch.Tensor, torch.Tensor]


class Messages(nn.Module):
    """Messages of neighbors, added up, and what they change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.pair, self.act1, self.act2 = nn.LayerNorm(WIDTH), nn.Identity(), nn.SiLU(), nn.SiLU()
        self.message1, self.message2 = nn.Linear(2 * WIDTH + 4, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = nn.LayerNorm(2 * WIDTH)
        self.update1, self.update2 = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act3 = nn.SiLU()

    def forward(self, x: torch.Tensor, ends: torch.Tensor, edges: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """
        Args:
            x: [nodes, width].
            ends: [nodes, neighbors], numbers of nodes.
            edges: [nodes, neighbors, 4], what is known of each edge.
            counts: [nodes, neighbors], 1 where an edge counts.
        """
        normed = self.norm(x)
        here = normed[:, None].expand(-1, ends.shape[1], -1)
        told = self.act1(self.message1(self.pair(torch.cat([here, normed[ends], edges], dim=-1))))
        told = self.act2(self.message2(told)) * counts[..., None]
        heard = torch.cat([normed, told.sum(dim=1) / NEIGHBORS], dim=-1)
        return x + self.update2(self.act3(self.update1(self.both(heard))))


class GraphNetwork(nn.Module):
    """Features of nodes in, a number for each node out."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.rounds = nn.ModuleList(Messages() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, nodes: torch.Tensor, ends: torch.Tensor, edges: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        x = self.enter(nodes)
        for messages in self.rounds:
            x = messages(x, ends, edges, counts)
        told: torch.Tensor = self.head(self.norm(x))
        return told[:, 0]


def draw_graphs(generator: torch.Generator) -> Batch:
    """Points in a square with their nearest neighbors and two padded edges; each node pulls at its neighbors, the more the
    closer they are.

    A row of a graph: features, neighbors, distances and whether an edge is real, side by side for each node.
    """
    place = draw_uniform(generator, GRAPHS, NODES, 2)
    far = torch.cdist(place, place) + 9 * torch.eye(NODES)
    nearest = far.topk(NEIGHBORS, largest=False).indices
    fake = torch.randint(NODES, (GRAPHS, NODES, FAKE), generator=generator)
    ends = torch.cat([nearest, fake], dim=2)
    real = torch.cat([torch.ones_like(nearest), torch.zeros_like(fake)], dim=2).float()
    features = draw_normal(generator, GRAPHS, NODES, FEATURES)
    apart = place[:, :, None] - place.gather(1, ends.flatten(1)[..., None].expand(-1, -1, 2)).view(*ends.shape, 2)
    length = apart.norm(dim=-1, keepdim=True)
    state = features[..., 0] * features[..., 1] + features[..., 2].abs() + torch.sin(2 * features[..., 3])
    for _ in range(2):
        pull = state.gather(1, ends.flatten(1)).view(ends.shape) * torch.exp(-4 * length[..., 0]) * real
        state = 0.6 * state + torch.tanh(pull.sum(dim=2))
    told = state + 0.15 * draw_normal(generator, GRAPHS, NODES)
    edges = torch.cat([4 * apart, 4 * length, torch.exp(-4 * length)], dim=-1)
    return torch.cat([features, ends.float(), edges.flatten(2), real], dim=2), told


def find_graph_loss(model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
    """Return the mean squared error over nodes; without the mask padded edges carry messages."""
    rows, told = batch
    edges_each = NEIGHBORS + FAKE
    features, ends, edges, real = rows.split([FEATURES, edges_each, 4 * edges_each, edges_each], dim=2)
    ends = (ends.long() + NODES * torch.arange(GRAPHS)[:, None, None]).flatten(0, 1)
    edges = edges.reshape(GRAPHS * NODES, edges_each, 4).bfloat16()
    counts = (real if masked else torch.ones_like(real)).flatten(0, 1).bfloat16()
    found = model(features.flatten(0, 1).bfloat16(), ends, edges, counts)
    return nn.functional.mse_loss(found.float(), told.flatten())


class PointNetwork(nn.Module):
    """The same MLP for each point, twice, each time with the largest features of all points; then one for the cloud."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(3, CLOUD_WIDTH)
        self.each = nn.ModuleList(ResidualMLP(CLOUD_WIDTH, CLOUD_WIDTH, nn.ReLU) for _ in range(depth))
        self.share = nn.ModuleList(nn.Linear(CLOUD_WIDTH, CLOUD_WIDTH) for _ in range(depth))
        self.cloud = ResidualMLP(CLOUD_WIDTH, 2 * CLOUD_WIDTH, nn.ReLU)
        self.norm, self.head = nn.LayerNorm(CLOUD_WIDTH), nn.Linear(CLOUD_WIDTH, SHAPES)

    def forward(self, points: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        x = torch.relu(self.enter(points))
        for each, share in zip(self.each, self.share, strict=True):
            x = each(x)
            x = x + share(_largest(x, hidden))[:, None]
        logits: torch.Tensor = self.head(self.norm(self.cloud(_largest(x, hidden))))
        return logits


def _largest(x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    seen = x if hidden is None else x.masked_fill(hidden[..., None], torch.finfo(x.dtype).min)
    return seen.amax(dim=1)


def draw_clouds(generator: torch.Generator) -> Batch:
    """Points of a surface, turned about an axis and stretched; a row past the points says how many of them are real."""
    labels = torch.randint(SHAPES, (CLOUDS,), generator=generator)
    u, v = 6.2832 * draw_uniform(generator, 2, CLOUDS, POINTS)
    w = draw_uniform(generator, CLOUDS, POINTS, low=-1.0)
    ring, edge = torch.sqrt((1 - w**2).clamp(min=0)), torch.stack([u.cos(), v.cos(), w], dim=-1)
    surfaces = (
        torch.stack([ring * u.cos(), ring * u.sin(), w], dim=-1),
        torch.stack([u.cos(), u.sin(), w], dim=-1),
        torch.stack([(1 - w) / 2 * u.cos(), (1 - w) / 2 * u.sin(), w], dim=-1),
        torch.stack([(0.7 + 0.3 * v.cos()) * u.cos(), (0.7 + 0.3 * v.cos()) * u.sin(), 0.3 * v.sin()], dim=-1),
        edge / edge.abs().amax(dim=-1, keepdim=True),
        torch.stack([w * u.cos(), w * u.sin(), w * w - 0.5], dim=-1),
        torch.stack([w, torch.sin(3 * w), v.cos() / 2], dim=-1),
        torch.stack([u.cos(), u.sin(), u / 3.1416 - 1], dim=-1),
    )
    cloud = torch.stack(surfaces)[labels, torch.arange(CLOUDS)]
    turn = 6.2832 * draw_uniform(generator, CLOUDS, 1)
    x, y = cloud[..., 0] * turn.cos() - cloud[..., 1] * turn.sin(), cloud[..., 0] * turn.sin() + cloud[..., 1] * turn.cos()
    cloud = torch.stack([x, y, cloud[..., 2]], dim=-1) * draw_uniform(generator, CLOUDS, 1, 3, low=0.7, high=1.3)
    cloud = cloud + JITTER * draw_normal(generator, CLOUDS, POINTS, 3)
    real = torch.randint(POINTS // 2, POINTS + 1, (CLOUDS, 1), generator=generator)
    padded = torch.arange(POINTS) >= real
    cloud = torch.where(padded[..., None], 2 * draw_normal(generator, CLOUDS, POINTS, 3), cloud)
    wrong = draw_uniform(generator, CLOUDS) < MISLABELED
    told = torch.where(wrong, torch.randint(SHAPES, (CLOUDS,), generator=generator), labels)
    return torch.cat([cloud, real[..., None].expand(-1, 1, 3).float()], dim=1), told


def find_cloud_loss(model: nn.Module, batch: Batch, masked: bool) -> torch.Tensor:
    """Return the mean over clouds; without the mask padded points count."""
    rows, labels = batch
    points, real = rows[:, :POINTS], rows[:, POINTS, :1]
    hidden = torch.arange(POINTS) >= real if masked else None
    return nn.functional.cross_entropy(model(points.bfloat16(), hidden).float(), labels)


FAMILIES = {
    "graph": HeldOutFamily(
        name="graph",
        make=GraphNetwork,
        draw_batch=draw_graphs,
        loss_of=find_graph_loss,
        layers=("rounds.*",),
        sites={"message1": "pair", "message2": "act1", "update1": "both", "update2": "act3"},
        layer="rounds.{}.",
        batch=GRAPHS,
        learning_rate=2e-3,
        changeable=("message1", "message2", "update1", "update2"),
    ),
    "points": HeldOutFamily(
        name="points",
        make=PointNetwork,
        draw_batch=draw_clouds,
        loss_of=find_cloud_loss,
        layers=("each.*", "share.*", "cloud.*"),
        sites=dict(MLP_SITES),
        layer="each.{}.",
        batch=CLOUDS,
        learning_rate=2e-3,
        changeable=("fc1", "fc2"),
    ),
}
