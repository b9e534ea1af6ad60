"""Values of the table that are fine, by argument: what looks bad in one place is meant in another.

Words: labels of `bad.VALUES`; "*" is any value at all. Names with a dot are one callable's, which win over the others.
"""

from __future__ import annotations

__all__ = ["accepted"]

POSITIVE, NONNEGATIVE, SHARE, COUNT, TEXT = "part huge", "zero part huge", "zero", "zero", "word"
FINE = {
    # numbers > 0
    **dict.fromkeys(
        [
            "bound_x",
            "bound",
            "offset",
            "width",
            "power",
            "threshold",
            "eps_error",
            "delta_error",
            "bound_y",
            "c_max",
            "c_min",
            "clip",
            "distance",
            "epochs",
            "epsilon",
            "gradient_diameter",
            "holder_constant",
            "lipschitz",
            "lr",
            "moment",
            "moment_order",
            "order",
            "pair_radius",
            "pl_constant",
            "rho",
            "second_moment",
            "strong_convexity",
            "total",
            "rate",
        ],
        POSITIVE,
    ),
    # numbers >= 0
    **dict.fromkeys(
        [
            "attack_radius",
            "b_query",
            "b_threshold",
            "eps",
            "exchange_rate",
            "grad_at_zero",
            "gradient_error",
            "l1",
            "l2",
            "loss_at_zero",
            "mu",
            "noise_multiplier",
            "noise_std",
            "scale",
            "score_offset",
            "sigma",
            "smoothing",
            "smoothness",
            "strength",
            "xi",
        ],
        NONNEGATIVE,
    ),
    # shares, 0 included, and counts, 0 included
    **dict.fromkeys(
        ["delta", "failure", "holder_exponent", "q", "quantile", "sample_rate", "target"],
        SHARE,
    ),
    **dict.fromkeys(["copy", "count", "num_workers"], COUNT),
    "radius": "part huge inf",
    "reg": NONNEGATIVE,
    "seed": "zero vast",
    "partition": TEXT,
    "weights": "tuple",
    "factors": "tuple",
    "norms": "tuple list",
    # one callable's
    "dp.Accountant.get_delta.epsilon": NONNEGATIVE,
    "dp.Accountant.ledger_path": TEXT,
    "dp.Accountant.part.part": "word zero minus vast",
    "dp.Accountant.state_dict.destination": "dict",
    "dp.Accountant.declare.steps": COUNT,
    "dp.Budget.declaring.steps": COUNT,
    "dp.CompiledRows.backend": TEXT,  # a name that torch.compile knows or not, when it compiles
    "dp.HolderSGD.ahead.steps": COUNT,
    "dp.HolderSGD.plan.dim": "none Model",
    "dp.HolderSGD.plan[noise].dim": "none Model",
    **{
        f"dp.{name}.plan[noise].dim": "none Model"
        for name in ("ClippedSGD", "AcceleratedSGD", "ProximalSGD")
    },
    **{
        f"dp.{name}.plan.dim": "Model"
        for name in ("ClippedSGD", "AcceleratedSGD", "ProximalSGD", "LocalizedSGD")
    },
    "dp.LocalizedSGD.plan[phases].dim": "none",
    **dict.fromkeys(
        ["dp.HolderSGD.loader.users", "dp.ClippedSGD.loader.users", "dp.standardize.users"],
        "none",
    ),
    **dict.fromkeys(
        [
            "dp.HolderSGD.loader.record_ids",
            "dp.ClippedSGD.loader.record_ids",
            "dp.UserClippedSGD.loader.record_ids",
            "dp.fit.record_ids",
            "dp.make_private.record_ids",
        ],
        "none",
    ),
    "dp.sampling.RecordIds.ids": "Array",
    "dp.UserClippedSGD.plan.dim": "none Model",
    "dp.UserClippedSGD.plan[noise].dim": "none Model",
    "dp.UserClippedSGD.plan[searched].dim": "none Model",
    "dp.UserClippedSGD.plan[prepared].dim": "Model",
    "dp.NetSGD.plan.dim": "Model",
    "dp.NetSGD.plan[noise].dim": "none Model",
    # as torch's: a scheduler's warm-up begins at 0, which make_private takes over, and groups of parameters bring
    # their own; a later change of it is free of charge
    **{
        f"dp.{name}.lr": NONNEGATIVE
        for name in (
            "PrivateOptimizer",
            *(
                f"{optimizer}.plan{variant}"
                for optimizer in (
                    "ClippedSGD",
                    "AcceleratedSGD",
                    "ProximalSGD",
                    "HolderSGD",
                    "CorrelatedSGD",
                    "NetSGD",
                )
                for variant in ("", "[noise]")
            ),
        )
    },
    "dp.UserFilteredSGD.plan.dim": "none Model",
    "dp.LocalizedUserSGD.plan.dim": "Model",
    **{
        f"dp.{name}.plan.model": "Model"
        for name in ("OutputPerturbation", "ObjectivePerturbation", "NoisyGD")
    },
    "dp.OutputPerturbation.plan[noise].model": "Model",
    **dict.fromkeys(
        ["dp.OutputPerturbation.plan.tilt", "dp.OutputPerturbation.plan[noise].tilt"],
        "zero part negative huge minus numpy",
    ),
    **dict.fromkeys(["dp.ObjectivePerturbation.plan.tilt", "dp.NoisyGD.plan.tilt"], "zero"),
    "dp.BoltOnPSGD.plan.dim": "Model",
    "dp.HolderOutputSGD.plan.dim": "Model",
    "dp.Problem.grad_bound.radius": "zero part huge inf",
    "dp.Schedule.locate.step": COUNT,
    "dp.doctor.loader": "none tuple list dict set Array Tensor Loader DataSet Model",
    "dp.doctor.record": "*",
    "dp.Accountant.authorize.releases": "dict",
    "dp.Accountant.bind.loader": "Loader",
    "dp.HolderSGD.step_on.rows": "none",  # the good call
    "dp.audit_training.canary": "tuple",
    "dp.audit.pair": "tuple list Tensor Array",
    "dp.fit.users": "none",
    "dp.fit[row-free].users": "none",
    **dict.fromkeys(["dp.fit[row-free].record_ids", "dp.fit[user].record_ids"], "none"),
    "dp.audit_training.other": "tuple",
    "dp.losses.EpsilonInsensitive.width": NONNEGATIVE,
    "dp.oracles.AdaptiveClipped.count_noise": "zero part",
    "dp.oracles.AdaptiveClipped.first": NONNEGATIVE,
    "dp.rules.AdamBC.floor": POSITIVE,
    "dp.rules.AdamBC.weight_decay": NONNEGATIVE,
    "dp.rules.Momentum.momentum": "zero",
    "attack_norm": "inf",
    "clip0": POSITIVE,
    "dp.oracles.UserClipped.clipping": "Oracle",
    "coupling_failure": "zero",
    "high": POSITIVE,
    "normalizer": POSITIVE,
    "tolerance": POSITIVE,
    "dp.per_record.loss": "Function Loss Model",
    "tar.TarRows.decode": "Class Function Loss Model",
    **dict.fromkeys(["tar.TarRows.shape", "tar.TarRows.target_shape"], "list"),  # a number
    "dp.oracles.UserFilter.threshold_scale": POSITIVE,
    "dp.oracles.UserFilter.query_scale": POSITIVE,
    "dp.oracles.UserFilter.typical_score": "zero part",
    "robust.Tilted.tilt": "zero part negative minus huge numpy",
    "estimators.LogisticRegression.preview.groups": "none",
    "estimators.LogisticRegression.preview.epsilons": "none tuple list set",
    "estimators.TiltedClassifier.tilt": "zero part negative minus huge numpy",
    "sample_weight": "none",
    "groups": "none",
    "estimators.QuantileRegressor.width": NONNEGATIVE,
    "intercept_scaling": POSITIVE,
    "classes": "tuple Array",
    **dict.fromkeys(
        ["dp.score.classes", "dp.score[auc].classes", "conformal.conformal.classes"],
        "none tuple Array",
    ),
    "conformal.conformal[targets].classes": "none",
    "ConformalSets.sets.X": "Tensor DataSet",
    "ConformalSets.intervals.X": "Tensor DataSet",
    "statistics.prepare.PrivateStandardScaler.fit.X": "Tensor DataSet",
    "statistics.prepare.PrivateStandardScaler.fit.y": "*",  # ignored
    **{
        f"statistics.prepare.Private{name}.lower": "negative numpy minus zero"
        for name in ("StandardScaler", "Quantiles", "Imputer")
    },
    **{
        f"statistics.prepare.Private{name}.upper": "part zero negative"
        for name in ("StandardScaler", "Quantiles", "Imputer")
    },
    "statistics.prepare.PrivateQuantiles.levels": "tuple list",
    "dp.Schema.target": "word",
    "dp.Schema.labels": "tuple",
    "dp.Schema.ids": "word",
    "dp.Schema.unit": "word",
    "dp.study.ledger_path": TEXT,
    **dict.fromkeys(
        ["statistics.study.plan_study[search].trials", "statistics.search.PrivateSearch.trials"],
        "part",
    ),
    "StudyPlan.run.ledger_path": TEXT,
    "feature_center": "none",
    "feature_scale": "none",
    "dp.prox.Box.high": "zero part huge inf minus negative",
    "dp.prox.Box.low": "zero minus negative numpy",
    **{
        f"opacus.PrivacyEngine.{name}.{argument}": fine
        for name in ("make_private", "make_private_with_epsilon")
        for argument, fine in (
            ("max_grad_norm", "part"),
            ("target_epsilon", POSITIVE),
            ("noise_generator", "none"),
        )
    },
    "events.Repeat.n": COUNT,
    "events.Sequential.events": "",
    "events.ZCDP.rho": NONNEGATIVE,
    "Audit.contradicts.epsilon": "zero part huge inf",
    "OneRunAudit.result.claimed": "zero part huge inf",
    **dict.fromkeys(["audit.OneRunAudit.guess_in", "audit.OneRunAudit.guess_out"], COUNT),
    **dict.fromkeys(["audit.epsilon_of_guesses.correct", "audit.mu_of_guesses.correct"], COUNT),
    "audit.canaries.labels": "tuple list",
    **dict.fromkeys(
        ["analysis.risk.Risk.of_point.epsilon", "Risk.delta_at.epsilon"], "zero part huge inf"
    ),
    **{
        f"Risk.{name}.false_positive": SHARE
        for name in ("false_negative", "true_positive", "posterior")
    },
    **dict.fromkeys(["Risk.posterior.prior", "Risk.words.prior"], SHARE),
    "Risk.words.unit": TEXT,
    **dict.fromkeys(
        [
            "Statement.named.unit",
            "Statement.named.plural",
            "statistics.results.Study.save.folder",
        ],
        TEXT,
    ),
    **dict.fromkeys(
        [f"{name}.save.path" for name in ("estimators.Released", "dp.Schema")], TEXT
    ),
    "opacus.PrivacyEngine.save_checkpoint.path": TEXT,
    "opacus.PrivacyEngine.save_checkpoint.checkpoint_dict": "dict",
    **{  # not looked at, as in Opacus
        f"opacus.PrivacyEngine.{name}.{argument}": "*"
        for name in ("validate", "is_compatible")
        for argument in ("optimizer", "data_loader")
    },
    "OneRunResult.contradicts.epsilon": "zero part huge inf",
    "estimators.Number.low": "zero minus negative numpy",
    "estimators.Dialect.sheet": "word",
    **dict.fromkeys(["estimators.Category.levels", "estimators.Ordered.levels"], "tuple"),
    "show.loggers.wandb.run": "Tensor",  # which has a method log
    "audit.OneRunAudit.dataset.base": "tuple list Tensor Array DataSet",
    "statistics.search.PrivateSearch.fit.X": "Tensor DataSet",  # of other lengths than y, which is named
    "StudyPlan.preview.frame": "none",
    "StudyPlan.preview.epsilons": "tuple list set",
    **{  # that of the plan it is given to
        f"dp.Budget{mode}.{name}": "none"
        for mode in ("", "[rdp]", "[rdp-mixture]")
        for name in ("adjacency", "unit")
    },
    "lightning.PrivateTraining.users": "*",  # compared with the data set, when training begins
    "dp.sampling.PoissonSampler.size": COUNT,  # of an empty data set, under add_remove
    "dp.sampling.FullSampler.size": COUNT,
}


def accepted(name: str, argument: str, label: str, annotation: str, typed: bool) -> bool:
    """Returns whether a value may be accepted; `typed`: whether it is of a type that the annotation names."""
    own = FINE.get(f"{name}.{argument}")
    words = (FINE.get(argument, "") if typed else "") if own is None else own
    if words == "*" or label in words.split():
        return True
    return typed and annotation != "Any" and (label in ("none", "true") or label[0].isupper())
