"""The VRAM budget: from a model's config and a run spec to bytes per phase and component, a verdict, and advice. Start
at `advise.plan.make_plan(spec)`. The packages stay empty, so that importing one module does not import the others."""
