"""The config: from JSON to a schema, and from the schema to a plan. Every error is found before anything is built."""
