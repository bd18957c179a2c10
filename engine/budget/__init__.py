"""The VRAM budget: from a model's config and a run spec to bytes per phase and component, a verdict, and advice.

`architecture` reads the facts of a model from its config, `trace` follows the lifetimes of tensors through a layer,
`predict` combines traces to phases of a step, `advise` turns a prediction into a plan and searches for changes that
make it fit. A caller needs `advise.plan.make_plan(spec)`, and `as_json()` of the plan it returns.

Light: pure Python, no torch. Import the module you need; the packages stay empty, so that importing one module does
not import the others.
"""
