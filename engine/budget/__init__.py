"""The VRAM budget: from a model's config and a run spec to bytes per phase and component, a verdict, and advice.

`architecture` reads a config into facts, `trace` follows the lives of tensors through a layer, `predict` puts traces
together to phases of a step, `advise` makes a plan of a prediction and searches changes that fit. A caller needs
`advise.plan.make_plan(spec)`, and `as_json()` of the plan it returns.

Light: pure Python, no torch. Import the module you need; the packages stay empty, so that importing one module does
not import the others.
"""
