//! Checks of a method's networks and masks: properties that the rest of the program relies on.

use networks::backbone::{ModelConfig, Readout};
use networks::head::{Head, Reads};
use networks::mask::MaskRule;

use super::Method;
use super::network::{Backbone, Moves, NetworkSpec};

/// Checks the networks and masks that `method` lists, where `model` is the recipe's backbone. A
/// violation is a mistake in the method, not in a recipe.
///
/// # Errors
/// A message that says what is wrong.
pub(crate) fn check(method: &dyn Method, model: &ModelConfig) -> Result<(), String> {
    let networks = method.networks();
    check_networks(&networks)?;
    check_unit_names(&networks, model)?;
    check_evaluated(&networks, method.evaluated())?;
    check_views(&networks, method.views().groups().len(), method.masks())
}

/// Checks that `model`, the recipe's backbone, supports masks if one of `networks` needs them, and
/// has no setting for masks if none does.
///
/// # Errors
/// A message with the key and what is wrong with it.
pub(crate) fn check_masks_fit(networks: &[NetworkSpec], model: &ModelConfig) -> Result<(), String> {
    match networks
        .iter()
        .find(|network| network.takes_masks && network.model(model).masked_units(Readout::Pooled).is_none())
    {
        Some(_) => {
            return Err("model.arch: the method masks patches, and this backbone has no tokens to mask: a transformer has".into());
        }
        None if networks.iter().any(|network| network.takes_masks) => return Ok(()),
        None => {}
    }
    match model.setting_of_masks() {
        Some(key) => Err(format!(
            "{key} takes effect only where patches are masked, and the method masks none: set {key}=false"
        )),
        None => Ok(()),
    }
}

/// Checks that one network is trained, that names are unique, and that networks and heads read what
/// comes before them.
fn check_networks(networks: &[NetworkSpec]) -> Result<(), String> {
    let n_trained = networks.iter().filter(|network| network.moves == Moves::ByGradient).count();
    if n_trained != 1 {
        return Err(format!("{n_trained} networks move by gradient, and it must be one"));
    }
    for (number, network) in networks.iter().enumerate() {
        let name = network.name;
        let before = &networks[..number];
        if before.iter().any(|other| other.name == name) {
            return Err(format!("two networks are called {name}"));
        }
        if let Some((of, _)) = network.moves.follows(0) {
            let trained = networks.iter().find(|other| other.moves == Moves::ByGradient);
            let Some(leader) = before.iter().chain(trained).find(|other| other.name == of) else {
                return Err(format!("the network {name} follows {of}, which does not come before it"));
            };
            check_follows(network, leader)?;
        }
        check_heads(network)?;
    }
    Ok(())
}

/// Checks that `network` can have the weights of `leader`.
fn check_follows(network: &NetworkSpec, leader: &NetworkSpec) -> Result<(), String> {
    let name = network.name;
    let of = leader.name;
    if leader.backbone != network.backbone {
        return Err(format!("the network {name} follows {of}, which has another backbone"));
    }
    if leader.takes_masks != network.takes_masks {
        return Err(format!("the network {name} follows {of}, and only one of them takes masks"));
    }
    let params = |head: &Head| -> Vec<_> {
        head.units.iter().map(|unit| (unit.name().to_string(), unit.params())).collect()
    };
    let has = |head: &Head| {
        leader.heads.iter().any(|found| found.name == head.name && params(found) == params(head))
    };
    match network.heads.iter().find(|head| !has(head)) {
        Some(head) => Err(format!("the network {name} follows {of}, which has no such head {}", head.name)),
        None => Ok(()),
    }
}

/// Checks that the units of a network have different names: checkpoints keep buffers by network and
/// unit.
fn check_unit_names(networks: &[NetworkSpec], model: &ModelConfig) -> Result<(), String> {
    for network in networks {
        let backbone = network.units(model);
        let units = backbone.iter().chain(network.heads.iter().flat_map(|head| &head.units));
        let mut names: Vec<&str> = units.map(|unit| unit.name()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("two units of the network {} are called {}", network.name, twice[0]));
        }
    }
    Ok(())
}

/// Checks names and inputs of a network's heads.
fn check_heads(network: &NetworkSpec) -> Result<(), String> {
    let name = network.name;
    for (i, head) in network.heads.iter().enumerate() {
        let called = head.name;
        let earlier = &network.heads[..i];
        if earlier.iter().any(|other| other.name == called) {
            return Err(format!("two heads of the network {name} are called {called}"));
        }
        let is_there = |read: &'static str| earlier.iter().any(|other| other.name == read);
        if let Some(read) = head.reads.head().filter(|read| !is_there(read)) {
            return Err(format!(
                "the head {called} of the network {name} reads {read}, which is not before it"
            ));
        }
        if let Some(read) =
            earlier.iter().find(|other| other.may_divide && head.reads.head() == Some(other.name))
        {
            return Err(format!(
                "the head {called} of the network {name} reads {}, which may be divided",
                read.name
            ));
        }
        let is_staged = head.units.last().is_none_or(|unit| unit.n_stages() > 1);
        if head.may_divide && is_staged {
            return Err(format!(
                "the head {called} of the network {name} may be divided: it must end with a unit of one stage"
            ));
        }
        if source(head, earlier).has_masked() {
            if !network.takes_masks {
                return Err(format!(
                    "the head {called} of the network {name} reads masked cells, and the network takes no masks"
                ));
            }
            if head.n_staged() > 0 {
                return Err(format!(
                    "the head {called} of the network {name} has statistics over masked cells"
                ));
            }
        }
    }
    Ok(())
}

/// Checks that the network `evaluated` exists, that its weights change, and that the recipe
/// describes its backbone.
fn check_evaluated(networks: &[NetworkSpec], evaluated: &str) -> Result<(), String> {
    let Some(network) = networks.iter().find(|network| network.name == evaluated) else {
        return Err(format!("the network {evaluated} is evaluated, and there is no such network"));
    };
    if network.moves == Moves::Frozen {
        return Err(format!("the network {evaluated} is evaluated, and it is frozen"));
    }
    if network.backbone != Backbone::OfRecipe {
        return Err(format!("the network {evaluated} is evaluated, and its backbone is not the recipe's"));
    }
    Ok(())
}

/// Checks that networks see views that exist, among `n_sizes` sizes, and masks that the method
/// draws.
fn check_views(networks: &[NetworkSpec], n_sizes: usize, masks: Option<MaskRule>) -> Result<(), String> {
    if let Some(rule) = masks {
        rule.validate()?;
        if rule.size >= n_sizes {
            return Err(format!(
                "masks: the rule is for view size number {}, and there are {n_sizes}, counted from 0",
                rule.size
            ));
        }
    }
    for network in networks {
        let name = network.name;
        for (i, sight) in network.sees.iter().enumerate() {
            let size = sight.size;
            if size >= n_sizes {
                return Err(format!(
                    "the network {name} sees view size number {size}, and there are {n_sizes}, counted from 0"
                ));
            }
            if network.sees[..i].iter().any(|other| other.size == size) {
                return Err(format!("the network {name} sees view size number {size} twice"));
            }
            if sight.masked && !network.takes_masks {
                return Err(format!("the network {name} is to see masks and takes none"));
            }
            if sight.masked && masks.is_none_or(|rule| rule.size != sight.size) {
                return Err(format!(
                    "the network {name} is to see masks of view size number {size}, and none are drawn"
                ));
            }
        }
    }
    Ok(())
}

/// Returns the features that `head` reads, itself or by way of heads among `earlier`.
fn source(head: &Head, earlier: &[Head]) -> Reads {
    let read = head.reads.head().and_then(|name| earlier.iter().position(|other| other.name == name));
    read.map_or(head.reads, |at| source(&earlier[at], &earlier[..at]))
}

#[cfg(test)]
mod tests {
    use networks::head::projection::{Normalizes, Projection};
    use networks::mask::Spread;
    use networks::patches::Normalization;
    use networks::unit::Unit;

    use super::*;
    use crate::method::network::Sight;

    fn head(name: &'static str, reads: Reads) -> Head {
        Head::new(name, reads, Vec::new())
    }

    fn trained() -> NetworkSpec {
        NetworkSpec::trained("a", vec![head("x", Reads::Pooled)], 1)
    }

    fn follower(name: &'static str, of: &'static str, heads: Vec<Head>) -> NetworkSpec {
        let moves = Moves::Copy { of, every_steps: 2, from_step: 4, max_updates: u64::MAX };
        NetworkSpec { moves, ..NetworkSpec::trained(name, heads, 1) }
    }

    fn assert_refused(result: Result<(), String>, why: &str) {
        let error = result.unwrap_err();
        assert!(error.contains(why), "{error}");
    }

    #[test]
    fn lists_that_cannot_be_run_are_refused() {
        let refused = |networks: Vec<NetworkSpec>, why: &str| assert_refused(check_networks(&networks), why);
        assert_eq!(check_networks(&[trained(), follower("b", "a", vec![head("x", Reads::Pooled)])]), Ok(()));
        let known = [follower("b", "a", Vec::new()), trained()];
        assert_eq!(check_networks(&known), Ok(()), "the trained network is known");
        refused(vec![], "0 networks move by gradient");
        refused(vec![trained(), trained()], "2 networks move by gradient");
        refused(vec![trained(), follower("a", "a", vec![])], "two networks are called a");
        refused(vec![trained(), follower("b", "c", vec![])], "follows c");
        refused(vec![trained(), follower("b", "c", vec![]), follower("c", "a", vec![])], "follows c");
        refused(vec![trained(), follower("b", "a", vec![head("y", Reads::Pooled)])], "no such head y");
        let twice = vec![head("x", Reads::Pooled), head("x", Reads::Patches)];
        refused(vec![NetworkSpec::trained("a", twice, 1)], "two heads");
        let mut without_token = follower("b", "a", Vec::new());
        without_token.takes_masks = true;
        refused(vec![trained(), without_token], "only one of them takes masks");
        let backwards = vec![head("x", Reads::Head("y")), head("y", Reads::Pooled)];
        refused(vec![NetworkSpec::trained("a", backwards, 1)], "reads y");
        let without_masks = vec![head("x", Reads::Masked), head("y", Reads::Head("x"))];
        refused(vec![NetworkSpec::trained("a", without_masks, 1)], "takes no masks");
    }

    #[test]
    fn followers_and_heads_fit_their_network() {
        let backbone = Backbone::Own(Box::new(ModelConfig::examples().remove(0)), Normalization::default());
        let other = NetworkSpec { backbone, ..follower("b", "a", Vec::new()) };
        assert_refused(check_networks(&[trained(), other]), "another backbone");
        let unit = |name: &str, normalizes| -> Box<dyn Unit> {
            Box::new(Projection { name: name.into(), widths: vec![6, 6], normalizes, has_biases: true })
        };
        let reader = Head { units: vec![unit("u", Normalizes::All)], ..head("y", Reads::Head("x")) };
        let heads = vec![head("x", Reads::Masked), reader];
        let masked = NetworkSpec { takes_masks: true, ..NetworkSpec::trained("a", heads, 1) };
        assert_refused(check_networks(&[masked]), "statistics over masked cells");
        let model = ModelConfig::examples().remove(0);
        let taken = trained().units(&model)[0].name().to_string();
        for names in [["u", "u"], ["u", &taken]] {
            let units = names.map(|name| unit(name, Normalizes::Nothing)).into();
            let spec = NetworkSpec::trained("a", vec![Head { units, ..head("x", Reads::Pooled) }], 1);
            assert_refused(check_unit_names(&[spec], &model), names[1]);
        }
    }

    #[test]
    fn the_evaluated_network_has_the_recipes_backbone_and_is_not_frozen() {
        let frozen = NetworkSpec { moves: Moves::Frozen, ..NetworkSpec::trained("f", Vec::new(), 1) };
        let networks = [trained(), frozen];
        assert_eq!(check_evaluated(&networks, "a"), Ok(()));
        assert_refused(check_evaluated(&networks, "b"), "no such network");
        assert_refused(check_evaluated(&networks, "f"), "is frozen");
        let backbone = Backbone::Own(Box::new(ModelConfig::examples().remove(0)), Normalization::default());
        let own = NetworkSpec { backbone, ..trained() };
        assert_refused(check_evaluated(&[own], "a"), "not the recipe's");
    }

    #[test]
    fn networks_see_views_and_masks_that_exist() {
        let rule = |size| {
            Some(MaskRule {
                size,
                masked_share: 0.5,
                ratio: [0.1, 0.5],
                spread: Spread::Exact,
                group: 0,
                smallest_block: networks::mask::SmallestBlock::Cells(4),
            })
        };
        let sees = |size, masked, takes_masks| {
            vec![NetworkSpec { sees: vec![Sight { size, masked }], takes_masks, ..trained() }]
        };
        assert_eq!(check_views(&sees(0, true, true), 2, rule(0)), Ok(()));
        assert_refused(check_views(&sees(2, false, false), 2, None), "number 2, and there are 2");
        let mut twice = sees(1, false, false);
        twice[0].sees.push(Sight { size: 1, masked: false });
        assert_refused(check_views(&twice, 2, None), "number 1 twice");
        assert_refused(check_views(&sees(0, true, false), 2, rule(0)), "takes none");
        assert_refused(check_views(&sees(0, true, true), 2, None), "none are drawn");
        assert_refused(check_views(&sees(0, true, true), 2, rule(1)), "none are drawn");
        assert_refused(check_views(&sees(0, false, false), 2, rule(2)), "number 2, and there are 2");
        let backwards = Some(MaskRule {
            size: 0,
            masked_share: 0.5,
            ratio: [0.5, 0.1],
            spread: Spread::Exact,
            group: 0,
            smallest_block: networks::mask::SmallestBlock::Cells(4),
        });
        assert_refused(check_views(&sees(0, false, false), 2, backwards), "shares lie in 0..=1");
    }
}
