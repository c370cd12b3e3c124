//! The networks of a run: one list of units for student and followers, backbone first, then the heads.

use networks::head::{Head, On, Reads};
use networks::unit::Unit;

use crate::method::{Follower, Method};

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

/// A head, and where its units are in the list.
#[derive(Clone, Copy)]
pub(crate) struct Placed<'a> {
    pub(crate) head: &'a Head,
    /// Number of its first unit.
    pub(crate) first: usize,
}

impl Placed<'_> {
    /// Numbers of the units that go through the passes of a step.
    pub(crate) fn staged(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.head.n_staged()
    }

    /// Numbers of those in the graph of the loss.
    pub(crate) fn in_graph(&self) -> std::ops::Range<usize> {
        self.staged().end..self.first + self.head.units.len()
    }
}

impl Net {
    pub(crate) fn new(backbone: Vec<Box<dyn Unit>>, method: &dyn Method) -> Self {
        let (heads, followers) = (method.heads(), method.followers());
        let behind = heads.iter().find(|head| head.n_staged() > 0 && matches!(head.reads, Reads::Head(_)));
        // The conformance test of methods builds every one.
        assert!(behind.is_none(), "a head with statistics over the batch reads the backbone");
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

    /// Unit `number` of the list.
    pub(crate) fn unit(&self, number: usize) -> &dyn Unit {
        self.units().nth(number).expect("numbers come from the list").unit
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

    /// The heads that the student has, or the followers too.
    pub(crate) fn heads_of(&self, of: On) -> impl Iterator<Item = Placed<'_>> {
        let placed = self.heads.iter().scan(self.backbone.len(), |next, head| {
            let first = *next;
            *next += head.units.len();
            Some(Placed { head, first })
        });
        placed.filter(move |placed| of == On::Student || placed.head.on == On::Both)
    }
}
