//! Models whose large units are divided, to compare them with undivided ones.

use crate::cost::{ModelCost, model_cost, preset};
use crate::recipe::plan::Plan;

/// Number of parameters above which a unit is divided, where that is considered.
const MAX_UNIT_PARAMETERS: usize = 100_000_000;

/// A model with divided units.
#[derive(Debug, Clone, PartialEq)]
pub struct DividedModel {
    /// Costs of the model.
    pub model: ModelCost,
    /// Largest number of parameters of a unit.
    pub max_unit_parameters: usize,
}

impl DividedModel {
    /// Divides `model`, the preset of its name; `None` if it has no large unit.
    pub fn from_preset(model: &ModelCost) -> Option<Self> {
        Self::from_model(model, |bound| preset(&model.name, Some(bound)))
    }

    /// Divides `model`, that of `plan`; `None` if it has no large unit.
    pub fn from_plan(model: &ModelCost, plan: &Plan) -> Option<Self> {
        Self::from_model(model, |bound| {
            let mut plan = plan.clone();
            plan.recipe.run.max_unit_parameters = Some(bound);
            model_cost(&plan).ok()
        })
    }

    /// Divides units of more than [`MAX_UNIT_PARAMETERS`], or of more than the largest part that
    /// cannot be divided, rounded up to two digits; `None` if no unit of `model` is as large.
    /// `divide` returns the model with a bound.
    fn from_model(model: &ModelCost, divide: impl Fn(usize) -> Option<ModelCost>) -> Option<Self> {
        let largest = divide(MAX_UNIT_PARAMETERS)?.largest_unit();
        let round = 10_usize.pow(largest.max(1).ilog10().saturating_sub(1));
        let bound = MAX_UNIT_PARAMETERS.max(largest.next_multiple_of(round));
        if model.largest_unit() <= bound {
            return None;
        }
        Some(Self { model: divide(bound)?, max_unit_parameters: bound })
    }
}
