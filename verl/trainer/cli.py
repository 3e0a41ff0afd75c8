"""The command line that ``main_ppo``, ``main_sft`` and ``main_eval`` share.

    compose -> read -> derive -> validate -> plan -> run

``parse`` does everything up to the typed configs, ``run`` the whole line; nothing heavy is imported
before ``main``. Whatever is wrong is said in one list: where single values are, the checks across
keys go on with the keys that are sound.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl.config.compose import config_names, expand_sweep
from verl.config.devices import Machine, stated_machine, use_machine
from verl.config.explain import explain
from verl.config.load import Draft, read_config, to_dict, to_yaml, warn_without_effect
from verl.config.plan import Facts, Plan, gather_facts, make_plan
from verl.config.plugged import plugged_names, schema_keys
from verl.config.problems import Names
from verl.config.registered_names import EXTERNAL_LIB, import_external
from verl.config.run_code import TRUST, refuse_code_of_run
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, Key, keys_of, lookup
from verl.config.settings.secret_values import hide_secrets
from verl.config.settings.unknown import children, nearest
from verl.config.validate import find_problems
from verl.utils.interrupt import Interruption

# A config name, or a choice that reads the overrides.
ConfigDefault = str | Callable[[Sequence[str]], str]
SHOWN = "# composed, not checked: --check says whether this run could start"
CHECKED = "checked, nothing was started: without --check this runs"
Config = PPOConfig | SFTConfig
Schema = type[PPOConfig] | type[SFTConfig]


@dataclass
class Command:
    """A parsed command line: configs to run, or ``text`` to show when there is nothing to run."""

    config_name: str = ""
    configs: list[Config] = field(default_factory=list)
    text: str | None = None
    only_check: bool = False
    machine: Machine | None = None  # that is checked for in place of this one


@dataclass(frozen=True)
class Inspection:
    """What a look at what a config names gave: problems, and facts for the plan (``Facts``)."""

    problems: Collection[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


# Some have facts as well as problems.
Inspect = Callable[..., Collection[str] | Inspection]


def _parser(prog: str) -> argparse.ArgumentParser:
    # Abbreviations are off: a mistyped option must be refused, not guessed.
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--help",
        "-h",
        nargs="?",
        const="",
        metavar="SECTION",
        help="this text, or the keys of SECTION",
    )
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="config to start from")
    parser.add_argument(
        "--config-path",
        "--config-dir",
        "-cp",
        "-cd",
        metavar="DIR",
        help="directory of your own configs",
    )
    parser.add_argument("--cfg", "-c", choices=("job",), help="print the composed config and stop")
    parser.add_argument(
        "--resolve",
        action="store_true",
        help="with --cfg job: interpolations and derived values filled in",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="everything up to starting: exit status 0 where the run could start, else 2",
    )
    parser.add_argument(
        "--on",
        metavar="DEVICES",
        help="with --check: for a machine with these and not for this one, as 8xH100 or "
        "2x8xA100:40 (nodes, GPUs of each, name, GiB)",
    )
    parser.add_argument(
        "--explain", metavar="KEY", help="what a key means in this configuration, and stop"
    )
    parser.add_argument(
        "--multirun",
        "-m",
        action="store_true",
        help="one job after the other for key=a,b key=range(0,3)",
    )
    parser.add_argument(
        "--trust-run-code",
        action="store_true",
        help=f"execute code that the stored config of a run names; also as {TRUST}=true",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides, in Hydra's grammar"
    )
    return parser


def parse(
    argv: Sequence[str] | None = None,
    config_default: ConfigDefault = "ppo_trainer",
    schema: Schema = PPOConfig,
    prog: str = "verl.trainer.main_ppo",
) -> Command:
    """Parse ``argv`` (default: the process's) and compose its configs, typed and derived.

    Raises ConfigError for anything wrong with names, keys, types or single values; it then lists
    what is wrong across keys as well.
    """
    parser = _parser(prog)
    # Intermixed: parse_args would refuse overrides on both sides of an option.
    args = parser.parse_intermixed_args(argv)
    if args.help is not None:
        return Command(text=_help(parser, args.help, args.config_path, schema))
    default = config_default if isinstance(config_default, str) else config_default(args.overrides)
    name = args.config_name or default
    if args.check and (args.cfg or args.explain):
        why = "with --cfg and --explain nothing is checked"
        raise ConfigError(f"--check: {why}; allowed: one of them; fix: leave the other out")
    machine = _machine(args, schema)
    overrides = [word for word in args.overrides if word != f"{TRUST}=true"]
    is_trusted = args.trust_run_code or len(overrides) < len(args.overrides)
    args.overrides = overrides
    if not is_trusted:
        refuse_code_of_run(name, args.config_path, overrides, schema)
    if args.cfg:
        return Command(name, text=_show(name, args, schema))
    if args.explain:
        draft = read_config(name, args.overrides, schema, args.config_path)
        return Command(name, text=explain(draft.sound(), args.explain))
    if args.multirun:
        drafts = _jobs(name, args, schema)
    else:
        drafts = [read_config(name, args.overrides, schema, args.config_path)]
    problems = [
        problem for draft in drafts for problem in (*_all_problems(draft), *draft.of_no_use)
    ]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    configs = [draft.config for draft in drafts]
    if args.multirun:
        _check_places(configs)
    return Command(name, configs, only_check=args.check, machine=machine)


def _machine(args: argparse.Namespace, schema: Schema) -> Machine | None:
    if args.on is None:
        return None
    if not args.check or schema is not PPOConfig:
        why = "nothing but a check of main_ppo, main_eval or main_audit is for another machine"
        raise ConfigError(f"--on {args.on}: {why}; allowed: with --check; fix: --check --on ...")
    return stated_machine(args.on)


def _all_problems(draft: Draft) -> list[str]:
    """What is wrong with a config that cannot be read, across keys too; nothing where it can."""
    if not draft.problems:
        return []
    return [*draft.problems, *find_problems(draft.config, _light_names(draft), partial=True)]


def _light_names(draft: Draft) -> Names:
    """Names that are known without importing what registers the others."""
    named = getattr(draft.config, "actor_rollout_ref", None)
    if named is not None and lookup(draft.config, EXTERNAL_LIB):
        # A module of the user's own may register more, and importing it here would not be light.
        return Names()
    return Names(environments=plugged_names(type(draft.config), "env") or None)


def _show(name: str, args: argparse.Namespace, schema: Schema) -> str:
    draft = read_config(name, args.overrides, schema, args.config_path)
    config = draft.sound()
    # A comment, so that what is written to a file from here is read as it was.
    return f"{SHOWN}\n{to_yaml(config if args.resolve else draft.tree)}"


def _jobs(name: str, args: argparse.Namespace, schema: Schema) -> list[Draft]:
    """The configs of a multirun, each with an experiment name, and so a run directory, of its
    own.
    """
    own_names = any(
        word.lstrip("+").startswith("trainer.experiment_name=") for word in args.overrides
    )
    drafts = []
    for index, words in enumerate(expand_sweep(args.overrides)):
        draft = read_config(name, words, schema, args.config_path)
        # A config that cannot be read has no name yet; it is refused for its problems anyway.
        if not own_names and not draft.problems:
            rename = f'trainer.experiment_name="{draft.config.trainer.experiment_name}-{index}"'
            draft = read_config(name, [*words, rename], schema, args.config_path)
        drafts.append(draft)
    return drafts


def _check_places(configs: Sequence[Config]) -> None:
    places = [cfg.trainer.default_local_dir for cfg in configs]
    # With resume_mode=auto the second job would go on from the first one's checkpoints.
    if len(set(places)) < len(places):
        raise ConfigError(
            f"trainer.default_local_dir: jobs of a multirun share {places[0]!r}; "
            "leave it to its default"
        )


def run(
    main: Callable[[Any], object],
    config_default: ConfigDefault = "ppo_trainer",
    schema: Schema = PPOConfig,
    prog: str = "verl.trainer.main_ppo",
    argv: Sequence[str] | None = None,
    names: Callable[[], Names] | None = None,
    inspect: Inspect | None = None,
    rehearse: Inspect | None = None,
) -> int:
    """Run ``main(cfg)`` for each config of the command line, after checks and plan; returns the
    exit status.

    0: done or shown; 2: refused, with every problem on standard error; 143 and 130: ended in order
    by SIGTERM or Ctrl-C. ``names`` gives what is registered and is called only when there is
    something to run, after the config's own ``external_lib`` was imported. ``inspect(cfg)`` gives
    further problems of a config that has none so far: those that only show with what it names at
    hand. With ``--check``, ``rehearse(cfg)`` gives those that show when pieces of the run are
    called, and nothing is run; with ``--on``, ``inspect(cfg, elsewhere=True)`` leaves out the
    devices of this machine. ``main`` may refuse as well, with a ``ConfigError``.
    """
    try:
        command = parse(argv, config_default, schema, prog)
        if command.text is not None:
            sys.stdout.write(command.text.rstrip("\n") + "\n")
            return 0
        # Before names(): importing these modules fills the registries that names() reads.
        if import_external(command.configs):
            # Read once more: what these modules register decides values that were left unset.
            command = parse(argv, config_default, schema, prog)
        for cfg in command.configs:
            hide_secrets(to_dict(cfg))  # from the log and from errors
        registered = names() if names else None
        # Every job is planned and checked before the first one starts: a refusal must not come
        # hours later, in the middle of a multirun.
        machine = command.machine
        missing = [problem for cfg in command.configs for problem in _missing(cfg, machine)]
        facts = [_facts(cfg, machine) for cfg in command.configs]
        look = partial(inspect, elsewhere=True) if inspect and machine else inspect
        asked = [look, rehearse if command.only_check else None]
        plans = _checked_plans(command.configs, facts, registered, asked, missing)
        if command.only_check:
            for cfg, plan in zip(command.configs, plans, strict=True):
                warn_without_effect(cfg)
                stated = f" for {machine}" if machine else ""
                show(plan, f"config {command.config_name}{stated}; {CHECKED}")
            return 0
        with Interruption() as interruption:
            for cfg, plan in zip(command.configs, plans, strict=True):
                warn_without_effect(cfg)
                show(plan, f"config {command.config_name}")
                main(cfg)
        return interruption.exit_status
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _checked_plans(
    configs: Sequence[Config],
    facts: list[Facts],
    names: Names | None,
    asked: Sequence[Inspect | None],
    missing: Sequence[str],
) -> list[Plan]:
    """The plans of the configs, with what ``asked`` found out about them; what is asked in turn is
    asked where nothing is wrong so far. Raises ConfigError with the problems.
    """
    found = [*missing, *(problem for cfg in configs for problem in find_problems(cfg, names))]
    plans = _planned(configs, facts, found)
    for ask in asked:
        if ask is None:
            continue
        inspections = [_inspection(ask(cfg)) for cfg in configs]
        found = [problem for inspection in inspections for problem in inspection.problems]
        for number, inspection in enumerate(inspections):
            facts[number] = dataclasses.replace(facts[number], **inspection.facts)
        plans = _planned(configs, facts, found)
    return plans


def _planned(
    configs: Sequence[Config], facts: Sequence[Facts], problems: Sequence[str]
) -> list[Plan]:
    """The plans; raises ConfigError with ``problems`` and those of the plans."""
    plans = [make_plan(cfg, known) for cfg, known in zip(configs, facts, strict=True)]
    found = dict.fromkeys([*problems, *(problem for plan in plans for problem in plan.problems())])
    if found:
        raise ConfigError(found)
    return plans


def _missing(cfg: Config, machine: Machine | None) -> list[str]:
    """What a stated machine lacks, for which ``cfg`` is then checked."""
    return use_machine(cfg, machine) if machine and isinstance(cfg, PPOConfig) else []


def _facts(cfg: Config, machine: Machine | None) -> Facts:
    facts = gather_facts(cfg)
    if machine is None:
        return facts
    # Of its host nothing is stated, and this one's memory says nothing of it.
    memory = {"device_memory_gb": machine.memory_gb, "memory_gb": None}
    return dataclasses.replace(facts, device="cuda", **memory)


def _inspection(found: Collection[str] | Inspection) -> Inspection:
    return found if isinstance(found, Inspection) else Inspection(found)


def show(plan: Plan, caption: str = "") -> None:
    """Print a plan: a table on a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console

        table = plan.table()
        table.caption = caption
        Console().print(table)
    else:
        sys.stdout.write(f"{plan.text()}\n  ({caption})\n")
        sys.stdout.flush()


def _help(
    parser: argparse.ArgumentParser, section: str, config_path: str | None, schema: Schema
) -> str:
    if section:
        return _help_section(section, schema)
    keys = keys_of(schema)
    names = children("", keys)
    sections = "\n".join(f"  {name:<24}{keys[name].doc}" for name in names)
    return (
        f"{parser.format_help()}\n"
        f"configs (--config-name):\n  {', '.join(config_names(config_path))}\n\n"
        f"sections (--help SECTION lists the keys of one, for example --help {names[0]}):\n"
        f"{sections}\n"
    )


def _help_section(section: str, schema: Schema) -> str:
    keys = schema_keys(schema)
    found = [key for path, key in keys.items() if path == section or path.startswith(f"{section}.")]
    if not found:
        guess = nearest(section, keys)
        hint = f"; did you mean {guess}?" if guess else ""
        raise ConfigError(f"--help {section}: no such section{hint}")
    return "\n".join(_help_key(key) for key in found if not key.is_section)


def _help_key(key: Key) -> str:
    default = "null" if key.default is None else key.default
    default = list(default) if isinstance(default, tuple) else default
    note = " [GPU only]" if key.gpu_only else ""
    if key.unused and key.unused.instead:
        note = f" [refused: {key.unused.why}; instead: {key.unused.instead}]"
    elif key.unused:
        note = f" [no effect: {key.unused.why}; accepted for {key.unused.carried_by}]"
    return f"{key.path}  ({key.allowed()}; default {default})\n    {key.doc}{note}"
