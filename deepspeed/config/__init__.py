"""The config: from JSON to a schema, from the schema to a plan. Every mistake is found before anything is built.

`sections/` has the pydantic model of each section a user may write, `schema.py` joins them, `analysis.py` reports all
mistakes at once, `plan.py` holds the decisions, which everything above reads instead of the config. Uses `base` and
`ops`. Start reading: `schema.py`, then `plan.py`.
"""
