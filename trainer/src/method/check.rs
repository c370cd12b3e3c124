//! Checks of the properties of a method's networks and masks that the rest of the program relies
//! on.

use networks::backbone::{ModelConfig, Readout};
use networks::head::{Head, Reads};
use networks::mask::{MaskRule, Masking};
use networks::params::ParamSpec;

use super::Method;
use super::network::{Backbone, NetworkSpec, UpdateRule, find_trained};

/// Checks the networks and masks that `method` lists. `model` is the recipe's backbone. A violation
/// is a mistake in the method, not in a recipe.
///
/// # Errors
/// A message with the reason.
pub(crate) fn check(method: &dyn Method, model: &ModelConfig) -> Result<(), String> {
    let networks = method.networks();
    check_networks(&networks)?;
    check_unit_names(&networks, model)?;
    check_evaluated(&networks, method.evaluated())?;
    check_views(&networks, method.views().groups().len(), method.masks())
}

/// Checks that `model`, the recipe's backbone, supports masks if one of `networks` needs them.
///
/// # Errors
/// A message with the key and the reason.
pub(crate) fn check_masks_fit(networks: &[NetworkSpec], model: &ModelConfig) -> Result<(), String> {
    let mut masked = networks.iter().filter(|network| network.takes_masks || drops_patches(network));
    if masked.any(|network| network.model(model).masked_units(Readout::Pooled).is_none()) {
        return Err("model.arch: the method masks patches, but this backbone has no tokens to mask: use a \
                    transformer, or a method that masks nothing, such as lejepa or dino"
            .into());
    }
    Ok(())
}

/// Returns whether the network does not see the masked patches of some views.
fn drops_patches(network: &NetworkSpec) -> bool {
    network.sees.iter().any(|views| views.masking == Masking::Dropped)
}

/// Returns a warning if `model`, the recipe's backbone, has a setting for masks without effect:
/// none of `networks` takes masks and also sees smaller views. It is no error, because runs that
/// began with such a setting must be resumed with it.
pub(crate) fn idle_setting_of_masks(networks: &[NetworkSpec], model: &ModelConfig) -> Option<String> {
    let key = model.setting_of_masks()?;
    if networks.iter().all(|network| !network.takes_masks) {
        return Some(format!(
            "{key} has no effect: it needs masked patches, and the method masks none (a new run can have \
             {key}=false)"
        ));
    }
    if networks.iter().all(|network| !network.takes_masks || network.sees.len() < 2) {
        return Some(format!(
            "{key} has no effect: it needs smaller views beside those with masked patches, and the method \
             sees views of one size (a new run can have {key}=false)"
        ));
    }
    None
}

/// Checks that one network is trained, that it outputs no levels, that names are unique, and that
/// networks and heads only depend on earlier ones.
fn check_networks(networks: &[NetworkSpec]) -> Result<(), String> {
    let n_trained = networks.iter().filter(|network| network.update_rule == UpdateRule::Gradient).count();
    if n_trained != 1 {
        return Err(format!("{n_trained} networks move by gradient, and it must be one"));
    }
    for (index, network) in networks.iter().enumerate() {
        let name = network.name;
        let earlier = &networks[..index];
        if earlier.iter().any(|other| other.name == name) {
            return Err(format!("two networks are called {name}"));
        }
        if let Some((source, _)) = network.update_rule.source_and_decay(0) {
            let trained = find_trained(networks);
            let Some(leader) = earlier.iter().chain(trained).find(|other| other.name == source) else {
                return Err(format!("the network {name} follows {source}, which does not come before it"));
            };
            check_follower(network, leader)?;
        }
        if network.update_rule == UpdateRule::Gradient && network.n_levels > 0 {
            return Err(format!("the network {name} moves by gradient, and outputs levels"));
        }
        check_heads(network)?;
    }
    Ok(())
}

/// Checks that `network` can be updated from the weights of `leader`.
fn check_follower(network: &NetworkSpec, leader: &NetworkSpec) -> Result<(), String> {
    let name = network.name;
    let source = leader.name;
    if leader.backbone != network.backbone {
        return Err(format!("the network {name} follows {source}, which has another backbone"));
    }
    if leader.takes_masks != network.takes_masks {
        return Err(format!("the network {name} follows {source}, and only one of them takes masks"));
    }
    for head in &network.heads {
        let counterpart = leader.heads.iter().find(|other| other.name == head.name);
        if counterpart.is_none_or(|other| unit_params(other) != unit_params(head)) {
            return Err(format!("the network {name} follows {source}, which has no such head {}", head.name));
        }
    }
    Ok(())
}

/// Returns the names and parameters of the units of `head`.
fn unit_params(head: &Head) -> Vec<(String, Vec<ParamSpec>)> {
    head.units.iter().map(|unit| (unit.name().to_string(), unit.params())).collect()
}

/// Checks that the units of a network have different names: checkpoints store buffers by network
/// and unit.
fn check_unit_names(networks: &[NetworkSpec], model: &ModelConfig) -> Result<(), String> {
    for network in networks {
        let backbone = network.units(model);
        let units = backbone.iter().chain(network.heads.iter().flat_map(|head| &head.units));
        let mut names: Vec<&str> = units.map(|unit| unit.name()).collect();
        names.sort_unstable();
        if let Some(duplicate) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("two units of the network {} are called {}", network.name, duplicate[0]));
        }
    }
    Ok(())
}

/// Checks the names and inputs of a network's heads.
fn check_heads(network: &NetworkSpec) -> Result<(), String> {
    let name = network.name;
    for (i, head) in network.heads.iter().enumerate() {
        let head_name = head.name;
        let earlier = &network.heads[..i];
        if earlier.iter().any(|other| other.name == head_name) {
            return Err(format!("two heads of the network {name} are called {head_name}"));
        }
        if let Some(read) = head.reads.head() {
            let Some(input) = earlier.iter().find(|other| other.name == read) else {
                return Err(format!(
                    "the head {head_name} of the network {name} reads {read}, which is not before it"
                ));
            };
            if input.may_divide {
                return Err(format!(
                    "the head {head_name} of the network {name} reads {read}, which may be divided"
                ));
            }
        }
        let is_staged = head.units.last().is_none_or(|unit| unit.n_stages() > 1);
        if head.may_divide && is_staged {
            return Err(format!(
                "the head {head_name} of the network {name} may be divided: it must end with a unit of one \
                 stage"
            ));
        }
        if source(head, earlier).has_masked() {
            if !network.takes_masks {
                return Err(format!(
                    "the head {head_name} of the network {name} reads masked cells, and the network takes \
                     no masks"
                ));
            }
            if network.sees.iter().any(|views| views.masking == Masking::Dropped) {
                return Err(format!(
                    "the head {head_name} of the network {name} reads masked cells, which the network drops"
                ));
            }
            if head.n_staged() > 0 {
                return Err(format!(
                    "the head {head_name} of the network {name} has statistics over masked cells"
                ));
            }
        }
    }
    Ok(())
}

/// Checks that the network `evaluated` exists, that its weights are updated, and that it has the
/// recipe's backbone.
fn check_evaluated(networks: &[NetworkSpec], evaluated: &str) -> Result<(), String> {
    let Some(network) = networks.iter().find(|network| network.name == evaluated) else {
        return Err(format!("the network {evaluated} is evaluated, and there is no such network"));
    };
    if network.update_rule == UpdateRule::Frozen {
        return Err(format!("the network {evaluated} is evaluated, and it is frozen"));
    }
    if network.backbone != Backbone::Recipe {
        return Err(format!("the network {evaluated} is evaluated, and its backbone is not the recipe's"));
    }
    Ok(())
}

/// Checks that networks only see views that exist, of which there are `n_sizes` sizes, and masks
/// that the method draws.
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
        for (i, views) in network.sees.iter().enumerate() {
            let size = views.size;
            if size >= n_sizes {
                return Err(format!(
                    "the network {name} sees view size number {size}, and there are {n_sizes}, counted from 0"
                ));
            }
            if network.sees[..i].iter().any(|other| other.size == size) {
                return Err(format!("the network {name} sees view size number {size} twice"));
            }
            if views.masking == Masking::Replaced && !network.takes_masks {
                return Err(format!("the network {name} is to see masks and takes none"));
            }
            if views.masking != Masking::Shown && masks.is_none_or(|rule| rule.size != size) {
                return Err(format!(
                    "the network {name} is to see masks of view size number {size}, and none are drawn"
                ));
            }
        }
    }
    Ok(())
}

/// Returns the features that `head` reads, directly or through heads among `earlier`.
fn source(head: &Head, earlier: &[Head]) -> Reads {
    let Some(read) = head.reads.head() else { return head.reads };
    match earlier.iter().position(|other| other.name == read) {
        Some(position) => source(&earlier[position], &earlier[..position]),
        None => head.reads,
    }
}

#[cfg(test)]
mod tests {
    use networks::head::projection::{Normalizes, Projection};
    use networks::mask::{BlockMasks, MaskKind, SmallestBlock, Spread};
    use networks::patches::Normalization;
    use networks::unit::Unit;

    use super::*;
    use crate::method::network::SeenViews;

    fn head(name: &'static str, reads: Reads) -> Head {
        Head::new(name, reads, Vec::new())
    }

    fn trained() -> NetworkSpec {
        NetworkSpec::trained("student", vec![head("image", Reads::Pooled)], 1)
    }

    fn follower(name: &'static str, source: &'static str, heads: Vec<Head>) -> NetworkSpec {
        let update_rule = UpdateRule::Copy { source, every_steps: 2, from_step: 4, max_updates: None };
        NetworkSpec { update_rule, ..NetworkSpec::trained(name, heads, 1) }
    }

    fn unit(name: &str, normalizes: Normalizes) -> Box<dyn Unit> {
        Box::new(Projection { name: name.into(), widths: vec![6, 6], normalizes, has_biases: true })
    }

    /// Returns a network that sees one view size.
    fn network_with_view(size: usize, masking: Masking, takes_masks: bool) -> Vec<NetworkSpec> {
        vec![NetworkSpec { sees: vec![SeenViews { size, masking }], takes_masks, ..trained() }]
    }

    fn mask_rule(size: usize, ratio: [f64; 2]) -> MaskRule {
        let kind = MaskKind::Blocks(BlockMasks {
            masked_share: 0.5,
            ratio,
            spread: Spread::Exact,
            group: 0,
            smallest_block: SmallestBlock::Cells(4),
        });
        MaskRule { size, kind }
    }

    /// Asserts that the error has these words, which no other check gives.
    fn assert_refused(result: Result<(), String>, words: &str) {
        let error = result.unwrap_err();
        assert!(error.contains(words), "{error}");
    }

    fn assert_networks_refused(networks: &[NetworkSpec], words: &str) {
        assert_refused(check_networks(networks), words);
    }

    #[test]
    fn invalid_lists_of_networks_are_refused() {
        assert_eq!(
            check_networks(&[trained(), follower("teacher", "student", vec![head("image", Reads::Pooled)])]),
            Ok(())
        );
        let listed_first = [follower("teacher", "student", Vec::new()), trained()];
        assert_eq!(check_networks(&listed_first), Ok(()), "a follower may precede the trained network");
        assert_networks_refused(&[], "0 networks move by gradient");
        assert_networks_refused(&[trained(), trained()], "2 networks move by gradient");
        let namesake = follower("student", "student", vec![]);
        assert_networks_refused(&[trained(), namesake], "two networks are called student");
        let before_it = "follows anchor, which does not come before it";
        assert_networks_refused(&[trained(), follower("teacher", "anchor", vec![])], before_it);
        let later_source =
            [trained(), follower("teacher", "anchor", vec![]), follower("anchor", "student", vec![])];
        assert_networks_refused(&later_source, before_it);
        let other_head = follower("teacher", "student", vec![head("patch", Reads::Pooled)]);
        assert_networks_refused(&[trained(), other_head], "no such head patch");
        let duplicates = vec![head("image", Reads::Pooled), head("image", Reads::Patches)];
        assert_networks_refused(&[NetworkSpec::trained("student", duplicates, 1)], "two heads");
        let mut masked_follower = follower("teacher", "student", Vec::new());
        masked_follower.takes_masks = true;
        assert_networks_refused(&[trained(), masked_follower], "only one of them takes masks");
        let with_levels = NetworkSpec { n_levels: 1, ..trained() };
        assert_networks_refused(&[with_levels], "moves by gradient, and outputs levels");
        let reversed = vec![head("image", Reads::Head("patch")), head("patch", Reads::Pooled)];
        let network = NetworkSpec::trained("student", reversed, 1);
        assert_networks_refused(&[network], "reads patch, which is not before it");
        let without_masks = vec![head("image", Reads::Masked), head("patch", Reads::Head("image"))];
        assert_networks_refused(&[NetworkSpec::trained("student", without_masks, 1)], "takes no masks");
        let sees = vec![SeenViews { size: 0, masking: Masking::Dropped }];
        let masked = NetworkSpec::trained("student", vec![head("image", Reads::Masked)], 1);
        let dropped = NetworkSpec { sees, takes_masks: true, ..masked };
        assert_networks_refused(&[dropped], "which the network drops");
    }

    #[test]
    fn followers_and_units_that_do_not_fit_their_network_are_refused() {
        let backbone =
            Backbone::Custom(Box::new(ModelConfig::examples().remove(0)), Normalization::default());
        let other = NetworkSpec { backbone, ..follower("teacher", "student", Vec::new()) };
        assert_networks_refused(&[trained(), other], "another backbone");
        let reader = Head { units: vec![unit("u", Normalizes::All)], ..head("patch", Reads::Head("image")) };
        let heads = vec![head("image", Reads::Masked), reader];
        let masked = NetworkSpec { takes_masks: true, ..NetworkSpec::trained("student", heads, 1) };
        assert_networks_refused(&[masked], "statistics over masked cells");
        let model = ModelConfig::examples().remove(0);
        let backbone_unit = trained().units(&model)[0].name().to_string();
        for names in [["u", "u"], ["u", &backbone_unit]] {
            let units = names.map(|name| unit(name, Normalizes::Nothing)).into();
            let spec =
                NetworkSpec::trained("student", vec![Head { units, ..head("image", Reads::Pooled) }], 1);
            let words = format!("two units of the network student are called {}", names[1]);
            assert_refused(check_unit_names(&[spec], &model), &words);
        }
    }

    #[test]
    fn a_setting_of_masks_needs_masks_and_smaller_views() {
        let examples = ModelConfig::examples();
        let model = examples.iter().find(|model| model.setting_of_masks().is_some()).unwrap();
        let warning = idle_setting_of_masks(&[trained()], model).unwrap();
        assert!(warning.contains("the method masks none"), "{warning}");
        let one_size = NetworkSpec { takes_masks: true, ..trained() };
        // A run that began with it can be resumed.
        assert_eq!(check_masks_fit(std::slice::from_ref(&one_size), model), Ok(()));
        let warning = idle_setting_of_masks(&[one_size], model).unwrap();
        assert!(warning.contains("sees views of one size"), "{warning}");
        let two_sizes = NetworkSpec { takes_masks: true, ..NetworkSpec::trained("student", Vec::new(), 2) };
        assert_eq!(idle_setting_of_masks(&[two_sizes], model), None);
        let plain = examples.iter().find(|model| model.setting_of_masks().is_none()).unwrap();
        assert_eq!(idle_setting_of_masks(&[trained()], plain), None);
    }

    #[test]
    fn the_evaluated_network_has_the_recipes_backbone_and_is_not_frozen() {
        let frozen =
            NetworkSpec { update_rule: UpdateRule::Frozen, ..NetworkSpec::trained("fixed", Vec::new(), 1) };
        let networks = [trained(), frozen];
        assert_eq!(check_evaluated(&networks, "student"), Ok(()));
        assert_refused(check_evaluated(&networks, "teacher"), "no such network");
        assert_refused(check_evaluated(&networks, "fixed"), "is frozen");
        let backbone =
            Backbone::Custom(Box::new(ModelConfig::examples().remove(0)), Normalization::default());
        let network = NetworkSpec { backbone, ..trained() };
        assert_refused(check_evaluated(&[network], "student"), "not the recipe's");
    }

    #[test]
    fn views_and_masks_that_do_not_exist_are_refused() {
        let [first, second, third] = [0, 1, 2].map(|size| Some(mask_rule(size, [0.1, 0.5])));
        let masked = network_with_view(0, Masking::Replaced, true);
        assert_eq!(check_views(&masked, 2, first), Ok(()));
        let too_large = network_with_view(2, Masking::Shown, false);
        assert_refused(check_views(&too_large, 2, None), "sees view size number 2, and there are 2");
        let mut duplicate = network_with_view(1, Masking::Shown, false);
        duplicate[0].sees.push(SeenViews { size: 1, masking: Masking::Shown });
        assert_refused(check_views(&duplicate, 2, None), "number 1 twice");
        assert_refused(check_views(&network_with_view(0, Masking::Replaced, false), 2, first), "takes none");
        assert_refused(check_views(&masked, 2, None), "none are drawn");
        assert_refused(check_views(&masked, 2, second), "none are drawn");
        let plain = network_with_view(0, Masking::Shown, false);
        assert_refused(check_views(&plain, 2, third), "rule is for view size number 2, and there are 2");
        let reversed = Some(mask_rule(0, [0.5, 0.1]));
        assert_refused(check_views(&plain, 2, reversed), "shares must lie in 0..=1");
    }
}
