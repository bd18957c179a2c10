"""The memory plan: bytes per phase and component, a verdict, and advice.

Start at `advise.plan.make_plan(spec)`. The packages are empty: importing one module does not import the others.
"""
