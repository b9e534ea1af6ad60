"""From a table to a decision: studies, and what is asked of released models: how good they are."""

from torch_dpsco.studies.study import Study, StudyPlan, plan_study

__all__ = ["Study", "StudyPlan", "plan_study"]
