"""Config keys of other RL projects, with the equivalent key of this framework for error messages.

Each key is an ``fnmatch`` pattern for a path or for ``path=value``. The first match applies.
"""

FOREIGN_KEYS = {
    "env.env_name=sciworld*": "env.env_name=scienceworld",
    "env.sciworld.generalization_level": (
        "env.scienceworld.val_split=dev (or test): the simulator's own held-out variations"
    ),
    "env.sciworld.env_step_limit": "env.max_steps",
    "env.sciworld.simplifications_preset": "env.scienceworld.simplification",
    "env.sciworld.meta_think": "env.levels=true, which asks for thinking levels",
    "env.sciworld.*": "env.env_name=scienceworld and its keys: --help env.scienceworld",
    "env.sciworld": "env.env_name=scienceworld and its keys: --help env.scienceworld",
    "env.*.generalization_level": (
        "held-out tasks: for 0 set env.alfworld.eval_dataset=eval_in_distribution, for 1 and more "
        "eval_out_of_distribution; kinds of tasks: env.alfworld.task_types"
    ),
    "env.*meta_think": "env.levels=true, which asks for thinking levels",
    "env.*action_only": "env.levels=false, which asks for no thoughts",
    "env.*env_step_limit": "env.max_steps",
    "algorithm.copo": "algorithm.adv_estimator=copo, set by algorithm.rlvcr.*",
    "algorithm.copo.*": (
        "algorithm.adv_estimator=copo has its keys in algorithm.rlvcr "
        "(score, mode, spread_floor, ...): --help algorithm.rlvcr"
    ),
    "algorithm.rlvmr*": "algorithm.adv_estimator=rlvcr, set by algorithm.rlvcr.*",
    "algorithm.cogrouter*": "algorithm.adv_estimator=copo, set by algorithm.rlvcr.*",
}
