//! Pictures of images of many channels, for people.

use super::image::Bands;
use crate::Rgb8;

/// Shares of a channel's values that a picture shows as black and as white.
const ENDS: [f64; 2] = [0.02, 0.98];

/// Returns a picture of `image`: its first three channels as red, green and blue, or its first one
/// as gray. Each channel is stretched from the second to the 98th hundredth of its values.
pub fn preview(image: &Bands) -> Rgb8 {
    let stretched: Vec<Vec<u8>> = image.channels().take(3).map(stretched).collect();
    let shown: [&[u8]; 3] = match stretched.as_slice() {
        [red, green, blue] => [red, green, blue],
        [gray, ..] => [gray; 3],
        [] => [&[]; 3],
    };
    let data = (0..image.n_pixels()).flat_map(|i| shown.map(|channel| channel[i])).collect();
    Rgb8::new(image.width_px, image.height_px, data)
}

fn stretched(channel: &[f32]) -> Vec<u8> {
    let mut sorted = channel.to_vec();
    let mut end = |share: f64| {
        let at = ((channel.len() - 1) as f64 * share) as usize;
        *sorted.select_nth_unstable_by(at, f32::total_cmp).1
    };
    let [black, white] = ENDS.map(&mut end);
    let scale = if white > black { 255.0 / (white - black) } else { 0.0 };
    channel.iter().map(|value| ((value - black) * scale).round() as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Depth;

    #[test]
    fn each_channel_is_stretched_and_one_is_gray() {
        let values = (0..100).map(|i| 1000.0 + i as f32).chain((0..100).map(|i| -(i as f32))).collect();
        let mut image = Bands { width_px: 10, height_px: 10, depth: Depth::Float, values };
        let picture = preview(&image);
        assert_eq!(
            (picture.data[0], picture.data[3 * 99], picture.data[3 * 50 + 1]),
            (0, 255, picture.data[3 * 50])
        );
        image.values.truncate(100);
        image.values.fill(7.0);
        assert_eq!(preview(&image).data, [0; 300]);
    }
}
