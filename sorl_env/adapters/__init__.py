"""Our episodes in the environments of other trainers; each adapter is thin, the rules are those of ``Episode``.

| module | for | needs |
|---|---|---|
| ``trl`` | TRL's ``GRPOTrainer(environment_factory=…)`` | nothing of TRL |
| ``gem`` | GEM's ``Env`` | gem-llm |
| ``verifiers`` | verifiers' ``Taskset`` and ``Env`` | verifiers 0.4 |
| ``skyrl_gym`` | SkyRL-gym's ``BaseTextEnv`` | skyrl-gym |
"""
