"""Proximal policy optimization: a rollout, advantages, minibatches over shuffled indices, four epochs."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import optexp


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x, action=None):
        policy = Categorical(logits=self.actor(x))
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.critic(x)


def minibatches(batch_size, minibatch_size, epochs):
    b_inds = np.arange(batch_size)
    for _ in range(epochs):
        np.random.shuffle(b_inds)
        for start in range(0, batch_size, minibatch_size):
            yield torch.from_numpy(b_inds[start : start + minibatch_size].copy())


if __name__ == "__main__":
    np.random.seed(1)
    torch.manual_seed(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    clip_coef, ent_coef, vf_coef = 0.2, 0.01, 0.5
    for update in range(2):
        b_obs, b_advantages, b_returns = torch.randn(128, 4), torch.randn(128), torch.randn(128)
        with torch.no_grad():
            b_actions, b_logprobs, _, _ = agent(b_obs)
        for mb in optexp.steps(minibatches(128, 32, 4), model=agent, optimizer=optimizer):
            _, newlogprob, entropy, newvalue = agent(b_obs[mb], b_actions[mb])
            ratio = (newlogprob - b_logprobs[mb]).exp()
            advantages = (b_advantages[mb] - b_advantages[mb].mean()) / (b_advantages[mb].std() + 1e-8)
            pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()
            v_loss = 0.5 * (newvalue.view(-1) - b_returns[mb]).square().mean()
            loss = pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
