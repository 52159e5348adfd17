"""Deep Q-learning: a replay memory of named tuples, a target network that follows slowly."""

import copy
import random
from collections import deque, namedtuple

import torch
from torch import nn

import optexp

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
GAMMA, TAU, BATCH_SIZE = 0.99, 0.005, 16


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)


def optimize_batch():
    return Transition(*map(torch.stack, zip(*memory.sample(BATCH_SIZE), strict=True)))


torch.manual_seed(0)
random.seed(0)
policy_net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
target_net = copy.deepcopy(policy_net)
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
criterion = nn.SmoothL1Loss()
memory = ReplayMemory(1000)
for _ in range(100):
    memory.push(torch.randn(4), torch.randint(2, (1,)), torch.randn(4), torch.randn(()))

for episode, batch in enumerate(optexp.steps(optimize_batch, model=policy_net, optimizer=optimizer)):
    state_action_values = policy_net(batch.state).gather(1, batch.action)
    with torch.no_grad():
        next_state_values = target_net(batch.next_state).max(1).values
    expected = next_state_values * GAMMA + batch.reward
    loss = criterion(state_action_values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    for kept, now in zip(target_net.parameters(), policy_net.parameters(), strict=True):
        kept.data.copy_(now.data * TAU + kept.data * (1 - TAU))
    if episode == 20:
        break
