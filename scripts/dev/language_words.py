"""Word lists of ``check_language``: banned words, banned names, and allowed public names.

A banned word is a regular expression, mapped to the words to use instead. It is matched against
lower-case prose, and against identifiers split into words (``left_out_rows``: "left out rows").
"""

# Banned in names, docstrings, comments, messages and docs.
BANNED = {
    r"play(s|ed|ing|er|ers)?": "episode, trajectory, rollout, generate",
    r"iterations?": "step",
    r"earn(s|ed|ing|ings)?": "return",
    r"worth": "return, value",
    r"pay(s|ing)?|paid": "reward",
    r"judge[sd]?": "reward model, grader",
    r"won|wins?": "success, is_success",
    r"broken?": "failed, invalid",
    r"left out|leav(e|es|ing) out": "dropped",
    r"under way": "in flight",
    r"carr(y|ied) over|carried": "continued; partial rollout",
    r"panels?": "validation set",
    r"garbage(?! collect)": "invalid environment return",
    r"guests?": "session",
    r"admitted": "registered",
    r"slack|slips?": "demonstration noise",
    r"deal(s|t|ing)?": "shard, dispatch, assign",
    r"hand(s|ed|ing)|hand (over|out|on|back|down|in)": "send, return, pass",
    r"sketch(es)?": "fingerprint",
    r"arrivals?": "receipt",
    r"learnt": "trained on",
    r"spread": "std; broadcast",
    r"l(ies?|ay|ying) between": "differs",
    r"how deep(ly)?": "thinking level",
    r"other thoughts?": "alternative thoughts",
    r"thinking credits?": "thinking advantage",
    r"cost shares?": "price share",
    r"confidence(?! (interval|band|bound|level))|certainty": "score of a context",
    r"beliefs?": "shrinkage slope",
    r"h(o|e)ld(s|ing)? up": "level entropy bonus",
    r"ground floor": "lowest layer",
    r"plug(s|ged)": "register, plug-in",
    r"rehears(e|es|ed|al|als)": "dry run",
    r"pass(ed|es)? over": "ignored",
    r"(of )?no use": "without effect, unused",
    r"mend(s|ed|ing)?": "fix",
    r"st(and|ands|ood|anding) still": "stalled",
    r"struck|strik(e|es|ing)": "injected fault",
    r"of (one|its|his|their|your|the user|a user)('?s)? own": "user-provided",
    r"anew": "again, re-...",
    r"besides?": "also, next to, apart from",
    r"less (the|its|his|their)": "minus",
    r"go(es|ing)? on|went on|gone on": "continue",
    r"nobody|whoever": "the real subject",
}
# Also banned, except in the packages of environments, where games have rooms and doors.
BANNED_OUTSIDE_GAMES = {r"rooms?": "package, module", r"houses?": "package", r"doors?": "address"}
# Banned only in prose, and banned only in names.
BANNED_IN_TEXT = {r"said|told": "name the mechanism"}
BANNED_IN_NAMES = {
    r"found|said|asked|told|own": "name the content",
    r"go on|let in|others tell|name of": "verb + object",
}
# Old identifiers with their new names. Only the whole identifier is banned, not its words.
BANNED_NAMES = {
    "Job": "RolloutSpec",
    "jobs_of": "rollout_specs",
    "Lookahead": "prefetch",
    "look_ahead": "prefetch_next_batch",
    "conclude": "log_validate_save",
    "weigh": "add_row_shares",
    "RestingEngines": "SleepAfterRollout",
    "narrowed": "select_columns",
    "put_in_order": "balance_rows",
    "IdleCalls": "ExclusiveCalls",
    "prove_arrival": "verify_weights_received",
    "prove_movement": "verify_weights_changed",
    "Collected": "rollout",
    "Extension": "ConfigPlugin",
    "Draft": "ParsedConfig",
    "World": "EnvironmentManagerBase",
    "ChoiceBonus": "level entropy bonus",
    "load_place": "load_import_path",
    "Elsewhere": "RemoteStacks",
}
# Public names (config keys, columns, metrics) that users rely on. They are allowed although they
# contain banned words.
PUBLIC = {
    "won",
    "play",
    "permute",
    "choose",
    "spread",
    "VectorisedPlay",
    "export_plays",
    "plays",
    "in_won",
    "won_by",
    "current_player_id",
    "carry_over_steps",
    "panel",
    "panel_batch",
    "panel_hash",
    "panel_loop",
    "carry_over",
    "audit_plays",
    "audit/plays",
    "price_in",
    "spread_floor",
    "groups_with_spread",
    "under_way",
    "aborted_env_garbage",
    "left_out_aborted",
}
# One-word function names that the field or a documented protocol uses. They count as ``one_word``,
# but not as ``unaccepted_word``.
ACCEPTED = """
abort acquire act add append backup backward build calculator call chat chunk clear close collect
compute concat connect content copy decode derive device dtype dumps encode evaluate exit export
filter finish first fit flush format forward from generate get help index init interrupt items join
keys kill len list load lock log logprobs lookup main map mean metadata name observe of open outputs
parse poll pop prepare print put rank read receive record recv register release rename render
reorder repeat replay reset resume reward rules run sample save score search seed select send serve
set shutdown situation size sleep spawn special split stage start state std step stop submit system
to tokenize train turn union unwrapped update validate values wait wake window workers write
"""
