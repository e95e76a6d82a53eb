"""A dataset of its own module, so that a spawned worker imports no more than it needs."""

import os
import time

import torch


class SlowRows(torch.utils.data.Dataset):
    """Each item takes a while, so that signals find the workers at work, and names its process."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.tensor(os.getpid())
