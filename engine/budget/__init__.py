"""WILL IT FIT: from an architecture's facts and a run spec to bytes per phase and component, a verdict, and advice.

Light: pure Python, no torch. Import the module you need (`architecture`, `predict`, `plan`, `advice`); this file stays
empty so that importing one does not pay for the others.
"""
