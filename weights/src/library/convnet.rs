//! Names of residual networks' parameters. Ours are torchvision's.

/// What a library calls a parameter; `None` for a name that is none of the network's.
pub(crate) type Renaming = fn(&str) -> Option<String>;

/// torchvision's and ours.
pub(crate) fn same(name: &str) -> Option<String> {
    Some(name.to_string())
}

/// A ResNet in transformers.
pub(crate) fn resnet_in_transformers(name: &str) -> Option<String> {
    if let Some(layer) = layer(name, "conv1", "bn1") {
        return Some(format!("embedder.embedder.{layer}"));
    }
    let (stage, rest) = name.strip_prefix("layer")?.split_once('.')?;
    let (branch, part) = rest.split_once('.')?;
    let layer = match part.strip_prefix("downsample.") {
        Some(part) => format!("shortcut.{}", layer(part, "0", "1")?),
        None => {
            let number = part.trim_start_matches(|c: char| c.is_alphabetic()).split('.').next()?;
            let layer = layer(part, &format!("conv{number}"), &format!("bn{number}"))?;
            format!("layer.{}.{layer}", before(number)?)
        }
    };
    Some(format!("encoder.stages.{}.layers.{branch}.{layer}", before(stage)?))
}

/// A RegNetY in transformers.
pub(crate) fn regnet_in_transformers(name: &str) -> Option<String> {
    if let Some(part) = name.strip_prefix("stem.") {
        return Some(format!("embedder.embedder.{}", layer(part, "0", "1")?));
    }
    let (stage, branch, part) = regnet_branch(name)?;
    let of_layer = |number: usize, part: &str| Some(format!("layer.{number}.{}", layer(part, "0", "1")?));
    let layer = if let Some(part) = part.strip_prefix("proj.") {
        format!("shortcut.{}", layer(part, "0", "1")?)
    } else if let Some(part) = part.strip_prefix("f.se.fc1.") {
        format!("layer.2.attention.0.{part}")
    } else if let Some(part) = part.strip_prefix("f.se.fc2.") {
        format!("layer.2.attention.2.{part}")
    } else {
        let (number, part) = in_branch(part, [0, 1, 3])?;
        of_layer(number, part)?
    };
    Some(format!("encoder.stages.{}.layers.{branch}.{layer}", stage - 1))
}

/// A RegNetY in timm.
pub(crate) fn regnet_in_timm(name: &str) -> Option<String> {
    let layer = |part: &str| match part.split_once('.')? {
        ("0", rest) => Some(format!("conv.{rest}")),
        ("1", rest) => Some(format!("bn.{rest}")),
        _ => None,
    };
    if let Some(part) = name.strip_prefix("stem.") {
        return Some(format!("stem.{}", layer(part)?));
    }
    let (stage, branch, part) = regnet_branch(name)?;
    let layer = if let Some(part) = part.strip_prefix("proj.") {
        format!("downsample.{}", layer(part)?)
    } else if let Some(part) = part.strip_prefix("f.se.") {
        format!("se.{part}")
    } else {
        let (number, part) = in_branch(part, [1, 2, 3])?;
        format!("conv{number}.{}", layer(part)?)
    };
    Some(format!("s{stage}.b{}.{layer}", branch + 1))
}

/// `conv.weight` and `norm.bias` as transformers calls them, where `conv` and `norm` are the names of the two.
fn layer(part: &str, conv: &str, norm: &str) -> Option<String> {
    let within = |name: &str| part.strip_prefix(name)?.strip_prefix('.');
    let convolution = within(conv).map(|rest| format!("convolution.{rest}"));
    convolution.or_else(|| Some(format!("normalization.{}", within(norm)?)))
}

/// Stage, branch and the rest of `trunk_output.block2.block2-0.f.a.0.weight`.
fn regnet_branch(name: &str) -> Option<(usize, usize, &str)> {
    let (_, rest) = name.strip_prefix("trunk_output.")?.split_once('.')?;
    let (block, part) = rest.split_once('.')?;
    let (stage, branch) = block.strip_prefix("block")?.split_once('-')?;
    Some((stage.parse().ok()?, branch.parse().ok()?, part))
}

/// The number that stands for `f.a`, `f.b` or `f.c`, and the rest.
fn in_branch(part: &str, numbers: [usize; 3]) -> Option<(usize, &str)> {
    let (letter, rest) = part.strip_prefix("f.")?.split_once('.')?;
    let at = ["a", "b", "c"].iter().position(|known| *known == letter)?;
    Some((numbers[at], rest))
}

fn before(number: &str) -> Option<usize> {
    number.parse::<usize>().ok()?.checked_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_libraries() {
        let cases: [(Renaming, &str, &str); 9] = [
            (resnet_in_transformers, "bn1.running_var", "embedder.embedder.normalization.running_var"),
            (
                resnet_in_transformers,
                "layer2.0.conv2.weight",
                "encoder.stages.1.layers.0.layer.1.convolution.weight",
            ),
            (
                resnet_in_transformers,
                "layer4.1.downsample.1.bias",
                "encoder.stages.3.layers.1.shortcut.normalization.bias",
            ),
            (
                regnet_in_transformers,
                "trunk_output.block2.block2-3.f.c.0.weight",
                "encoder.stages.1.layers.3.layer.3.convolution.weight",
            ),
            (
                regnet_in_transformers,
                "trunk_output.block1.block1-0.f.se.fc2.bias",
                "encoder.stages.0.layers.0.layer.2.attention.2.bias",
            ),
            (regnet_in_transformers, "stem.1.weight", "embedder.embedder.normalization.weight"),
            (regnet_in_timm, "trunk_output.block1.block1-0.f.b.1.bias", "s1.b1.conv2.bn.bias"),
            (regnet_in_timm, "trunk_output.block4.block4-5.proj.0.weight", "s4.b6.downsample.conv.weight"),
            (regnet_in_timm, "stem.0.weight", "stem.conv.weight"),
        ];
        for (renaming, ours, theirs) in cases {
            assert_eq!(renaming(ours).as_deref(), Some(theirs), "{ours}");
        }
        assert_eq!(resnet_in_transformers("fc.weight"), None);
    }
}
