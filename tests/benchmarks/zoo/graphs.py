"""Graphs, point clouds and sparse matrices."""

import torch
import torch.nn.functional as F
from torch import nn

NODES, EDGES, WIDTH = 60, 400, 16


def edges():
    return torch.randint(0, NODES, (2, EDGES))


class MessagePassing(nn.Module):
    """GraphSAGE: the mean of messages by index_add and degrees."""

    def __init__(self):
        super().__init__()
        self.message, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        source, target = edge_index
        messages = torch.relu(self.message(x))[source]
        total = torch.zeros_like(x).index_add_(0, target, messages.to(x.dtype))
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1).to(x.dtype)
        return self.own(x) + total / degree[:, None]


def message_passing_inputs():
    return [torch.randn(NODES, WIDTH), edges(), torch.randint(0, WIDTH, (NODES,))]


def message_passing_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[2])


class GraphAttention(nn.Module):
    """GAT: a softmax over the edges of each node, by scatter_reduce and scatter_add."""

    def __init__(self, heads=2):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.left = nn.Parameter(0.3 * torch.randn(heads, WIDTH // heads))
        self.right = nn.Parameter(0.3 * torch.randn(heads, WIDTH // heads))
        self.heads = heads

    def forward(self, x, edge_index):
        source, target = edge_index
        h = self.lin(x).view(len(x), self.heads, -1)
        score = F.leaky_relu((h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target], 0.2)
        index = target[:, None].expand(-1, self.heads)
        most = torch.full((len(x), self.heads), -1e9, device=x.device, dtype=score.dtype)
        most = most.scatter_reduce(0, index, score, "amax", include_self=True)
        weight = (score - most.detach()[target]).exp()
        total = torch.zeros_like(most).scatter_add(0, index, weight)
        weight = weight / (total[target] + 1e-16)
        out = torch.zeros_like(h).index_add(0, target, h[source] * weight[..., None].to(h.dtype))
        return F.elu(out.flatten(1))


def graph_attention_inputs():
    return [torch.randn(NODES, WIDTH), edges()]


class GCN(nn.Module):
    """Kipf and Welling: a normalised adjacency as a sparse COO matrix made from an edge list in forward."""

    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x, edge_index):
        values = torch.full((edge_index.shape[1],), 1.0 / 7, device=x.device, dtype=x.dtype)
        adjacency = torch.sparse_coo_tensor(edge_index, values, (len(x), len(x)))
        h = F.relu(torch.sparse.mm(adjacency, self.lin1(x)))
        return F.log_softmax(torch.sparse.mm(adjacency, self.lin2(h)), dim=1)


def gcn_inputs():
    return [torch.randn(NODES, WIDTH), edges(), torch.randint(0, 4, (NODES,))]


def gcn_loss(outputs, batch):
    return F.nll_loss(outputs, batch[2])


class FixedGraph(nn.Module):
    """The adjacency is a dense buffer, normalised symmetrically in forward."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("adjacency", (torch.rand(NODES, NODES, generator=generator) < 0.1).float())
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a = self.adjacency + torch.eye(len(self.adjacency), device=x.device, dtype=x.dtype)
        d = a.sum(1).rsqrt()
        return torch.relu((d[:, None] * a * d) @ self.lin(x))


def fixed_graph_inputs():
    return [torch.randn(4, NODES, WIDTH)]


class SparseBuffer(nn.Module):
    """A fixed sparse CSR adjacency in a buffer."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("adjacency", (torch.rand(NODES, NODES, generator=generator) < 0.1).float().to_sparse_csr())
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu(self.lin(self.adjacency @ x))


def sparse_buffer_inputs():
    return [torch.randn(NODES, WIDTH)]


class PointNet(nn.Module):
    """A shared MLP by 1×1 convolutions with batch norm, and a max over points."""

    def __init__(self, classes=4):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)
        self.fc1, self.fc2, self.bn3 = nn.Linear(32, 16), nn.Linear(16, classes), nn.BatchNorm1d(16)

    def forward(self, points):
        x = F.relu(self.bn1(self.conv1(points)))
        x = self.bn2(self.conv2(x)).max(dim=2)[0]
        return F.log_softmax(self.fc2(F.relu(self.bn3(self.fc1(x)))), dim=1)


def point_net_inputs():
    return [torch.randn(8, 3, 64), torch.randint(0, 4, (8,))]


def point_net_loss(outputs, batch):
    return F.nll_loss(outputs, batch[1])


class EdgeConv(nn.Module):
    """DGCNN: k nearest neighbours by top-k of distances, features of edges, a max over neighbours."""

    def __init__(self, k=6):
        super().__init__()
        self.k = k
        self.mlp = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, points):
        distance = torch.cdist(points, points)
        index = distance.topk(self.k, largest=False).indices
        batch = torch.arange(len(points), device=points.device)[:, None, None]
        neighbours = points[batch, index]
        centre = points[:, :, None].expand_as(neighbours)
        return self.mlp(torch.cat([centre, neighbours - centre], -1)).amax(2)


def edge_conv_inputs():
    return [torch.randn(2, 32, 3)]


class ChamferDistance(nn.Module):
    """Between a cloud and one that an MLP moved."""

    def __init__(self):
        super().__init__()
        self.move = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, a, b):
        d = (self.move(a)[:, :, None] - b[:, None]).square().sum(-1)
        return d.min(1).values.mean() + d.min(2).values.mean()


def chamfer_distance_inputs():
    return [torch.randn(2, 24, 3), torch.randn(2, 30, 3)]


class SegmentPool(nn.Module):
    """Pooling over graphs of a batch by segment ids, sums and maxima side by side."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2 * WIDTH, 5)

    def forward(self, x, batch):
        index = batch[:, None].expand_as(x)
        total = x.new_zeros(8, WIDTH).scatter_add(0, index, x)
        most = x.new_full((8, WIDTH), -10.0).scatter_reduce(0, index, x, "amax")
        return self.lin(torch.cat([total, most], 1))


def segment_pool_inputs():
    return [torch.randn(NODES, WIDTH), torch.randint(0, 8, (NODES,)).sort().values]


class SparseInput(nn.Module):
    """Kipf's GCN over a sparse adjacency that the batch brings; a mask picks the labelled nodes."""

    def __init__(self, features=12, hidden=16, classes=4):
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, classes)

    def forward(self, x, adjacency):
        hidden = F.relu(torch.spmm(adjacency, self.first(x)))
        return F.log_softmax(torch.spmm(adjacency, self.second(hidden)), dim=1)


def sparse_input_inputs(nodes=30):
    links = (torch.rand(nodes, nodes) < 0.15).float()
    links = torch.clamp(links + links.T + torch.eye(nodes), max=1)
    scale = links.sum(1).rsqrt()
    labelled = torch.rand(nodes) < 0.4
    return [
        torch.randn(nodes, 12),
        (scale[:, None] * links * scale).to_sparse(),
        torch.randint(0, 4, (nodes,)),
        labelled,
    ]


def sparse_input_loss(outputs, batch):
    labelled = batch[3]
    return F.nll_loss(outputs[labelled], batch[2][labelled])
