"""The config: parsed from JSON into a schema, resolved into a plan. All mistakes are found before anything is built.

`sections/` has the pydantic model of each section a user may write, `schema.py` joins them, `analysis.py` reports all
mistakes at once, `plan.py` holds the decisions, which all higher layers read instead of the config. Uses `base` and
`ops`. Start reading: `schema.py`, then `plan.py`.
"""
