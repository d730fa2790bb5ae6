"""Text environments for search agents. Importing this package registers them with gymnasium.

>>> import gymnasium, sorl_env                     # doctest: +SKIP
>>> env = gymnasium.make("SearchQA-v0")            # doctest: +SKIP

Entry points are strings, so that nothing is loaded before an environment is made.
"""

from gymnasium.envs.registration import register, registry

_ENVIRONMENTS = {
    "SearchQA-v0": ("sorl_env.search_qa:SearchQAEnv", "sorl_env.vector:SearchQAVectorEnv"),
    "MedicalQA-v0": ("sorl_env.medical_qa:MedicalQAEnv", "sorl_env.medical_qa:MedicalQAVectorEnv"),
    "MathQA-v0": ("sorl_env.math_qa:MathQAEnv", "sorl_env.math_qa:MathQAVectorEnv"),
}

for _id, (_single, _vector) in _ENVIRONMENTS.items():
    if _id not in registry:
        register(id=_id, entry_point=_single, vector_entry_point=_vector)
