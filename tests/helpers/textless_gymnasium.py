"""Two Gymnasium environments without a text description."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Bare(gymnasium.Env):
    """Say 1 twice."""

    def __init__(self):
        left = spaces.Box(0.0, 9.0, (2,), np.float32)
        self.observation_space = spaces.Dict({"place": spaces.Discrete(3), "left": left})
        self.action_space = spaces.Discrete(2)
        self.place = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self._see(), {}

    def step(self, action):
        self.place += int(action)
        done = self.place == 2
        return self._see(), float(done), done, False, {}

    def _see(self):
        return {"place": self.place, "left": np.array([0.5, 2 - self.place], np.float32)}


class Drawn(Bare):
    """The same environment with observations as pictures."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)


gymnasium.register("Bare-v0", entry_point=f"{__name__}:Bare")
gymnasium.register("Drawn-v0", entry_point=f"{__name__}:Drawn")
