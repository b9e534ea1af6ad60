"""From a table to a decision: studies, searches, and how good and how sure released models are."""

from torch_dpsco.studies.conformal import ConformalSets, conformal
from torch_dpsco.studies.search import PrivateSearch, SearchPlan
from torch_dpsco.studies.study import Study, StudyPlan, plan_study

__all__ = [
    "ConformalSets",
    "PrivateSearch",
    "SearchPlan",
    "Study",
    "StudyPlan",
    "conformal",
    "plan_study",
]
