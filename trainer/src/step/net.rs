//! The networks of a run: one list of units for student and followers, backbone first, then the heads.

use crate::method::{Follower, Method};
use crate::model::head::{Head, On};
use crate::model::unit::Unit;
use crate::optim::state::UnitShard;

/// The networks.
pub(crate) struct Net {
    pub(crate) backbone: Vec<Box<dyn Unit>>,
    pub(crate) heads: Vec<Head>,
    pub(crate) followers: Vec<Follower>,
}

/// A unit of the list, and which it is.
#[derive(Clone, Copy)]
pub(crate) struct Numbered<'a> {
    pub(crate) number: usize,
    pub(crate) unit: &'a dyn Unit,
    /// Number of its module: the backbone is 0, heads follow.
    pub(crate) module: usize,
    pub(crate) on: On,
}

impl Net {
    pub(crate) fn new(backbone: Vec<Box<dyn Unit>>, method: &dyn Method) -> Self {
        let (heads, followers) = (method.heads(), method.followers());
        let staged = heads.iter().flat_map(|head| &head.units).find(|unit| unit.n_stages() > 1);
        // Heads are one graph a micro-batch. The conformance test of methods builds every one.
        assert!(staged.is_none(), "a unit of a head has one stage");
        Self { backbone, heads, followers }
    }

    /// All units, in the order of the shards.
    pub(crate) fn units(&self) -> impl Iterator<Item = Numbered<'_>> {
        let backbone = self.backbone.iter().map(|unit| (unit, 0, On::Both));
        let heads = self.heads.iter().enumerate();
        let heads = heads.flat_map(|(i, head)| head.units.iter().map(move |unit| (unit, i + 1, head.on)));
        let numbered = backbone.chain(heads).enumerate();
        numbered.map(|(number, (unit, module, on))| Numbered { number, unit: unit.as_ref(), module, on })
    }

    /// Whether unit `number` belongs to the backbone.
    pub(crate) fn is_backbone(&self, number: usize) -> bool {
        number < self.backbone.len()
    }

    /// Names of the followers that have a unit.
    pub(crate) fn followers_of(&self, on: On) -> Vec<&'static str> {
        match on {
            On::Both => self.followers.iter().map(|follower| follower.name).collect(),
            On::Student => Vec::new(),
        }
    }

    /// Units of the heads that followers have.
    pub(crate) fn n_shared_head_units(&self) -> usize {
        self.heads.iter().filter(|head| head.on == On::Both).map(|head| head.units.len()).sum()
    }

    /// The shards of the heads' units.
    pub(crate) fn head_shards<'s>(&self, shards: &'s [UnitShard]) -> &'s [UnitShard] {
        &shards[self.backbone.len()..]
    }
}
