//! A procedural, labelled image set: ten shapes, drawn so that nothing but the shape tells the class.
//!
//! Colors, position, size, rotation, stroke and background vary independently of the class, and
//! every image has clutter from the same distribution. Pixels are a pure function of (seed, number).

use augment::ViewRng;

/// Names of the ten classes.
pub(crate) const CLASSES: [&str; 10] =
    ["disc", "ring", "square", "frame", "triangle", "cross", "star", "bars", "dots", "crescent"];

/// Keeps these streams apart from all others.
const DOMAIN: u64 = 0x7379_6e74_6800_0000;

/// Image `number` of the set `seed`: its class and its RGB pixels, `size_px` a side.
pub(crate) fn image(seed: u64, number: u64, size_px: u32) -> (u32, Vec<u8>) {
    let mut rng = ViewRng::from_words([seed, DOMAIN, number, 0]);
    let class = rng.below(CLASSES.len() as u32);
    let scene = Scene::draw(&mut rng);
    let mut pixels = Vec::with_capacity(3 * (size_px * size_px) as usize);
    let mut grain = ViewRng::from_words([seed, DOMAIN, number, 1]);
    for y in 0..size_px {
        for x in 0..size_px {
            // Four samples a pixel soften the edges.
            let mut sum = [0.0f64; 3];
            for (dx, dy) in [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)] {
                let at = [(f64::from(x) + dx) / f64::from(size_px), (f64::from(y) + dy) / f64::from(size_px)];
                let color = scene.color(class, at);
                sum.iter_mut().zip(color).for_each(|(sum, c)| *sum += c / 4.0);
            }
            let noise = f64::from(grain.normal()) * scene.noise;
            pixels.extend(sum.map(|v| ((v + noise) * 255.0).clamp(0.0, 255.0) as u8));
        }
    }
    (class, pixels)
}

struct Scene {
    center: [f64; 2],
    radius: f64,
    rotation: [f64; 2],
    shape_color: [f64; 3],
    background: [[f64; 3]; 2],
    gradient: [f64; 2],
    texture: [f64; 4],
    blobs: Vec<([f64; 2], f64, [f64; 3])>,
    noise: f64,
}

impl Scene {
    fn draw(rng: &mut ViewRng) -> Self {
        let color = |rng: &mut ViewRng, low: f64, high: f64| [(); 3].map(|()| rng.between(low, high));
        let background = color(rng, 0.1, 0.9);
        // The two ends of the gradient are neighbors in color.
        let background =
            [background, background.map(|c| (c + 0.3 * (rng.between(-0.5, 0.5))).clamp(0.0, 1.0))];
        let mut shape_color = color(rng, 0.0, 1.0);
        // A shape nobody can see has no class: its luma keeps away from the background's.
        let luma = |c: [f64; 3]| (c[0] + c[1] + c[2]) / 3.0;
        let behind = (luma(background[0]) + luma(background[1])) / 2.0;
        if (luma(shape_color) - behind).abs() < 0.3 {
            let shift = if behind > 0.5 { -0.45 } else { 0.45 };
            shape_color = shape_color.map(|c| (0.5 * c + 0.5 * behind + shift).clamp(0.0, 1.0));
        }
        let radius = rng.between(0.26, 0.42);
        let room = 0.5 - radius * 0.8;
        let center = [0.5 + rng.between(-room, room), 0.5 + rng.between(-room, room)];
        let angle = rng.between(-0.5, 0.5);
        let direction = rng.between(0.0, std::f64::consts::TAU);
        let wave = rng.between(0.0, std::f64::consts::TAU);
        let frequency = rng.between(5.0, 40.0);
        let blobs = (0..rng.below(3)).map(|_| {
            let at = [rng.between(0.0, 1.0), rng.between(0.0, 1.0)];
            (
                at,
                rng.between(0.02, 0.05),
                [rng.between(0.0, 1.0), rng.between(0.0, 1.0), rng.between(0.0, 1.0)],
            )
        });
        let blobs = blobs.collect();
        Self {
            center,
            radius,
            rotation: [angle.cos(), angle.sin()],
            shape_color,
            background,
            gradient: [direction.cos(), direction.sin()],
            texture: [
                wave.cos() * frequency,
                wave.sin() * frequency,
                rng.between(0.0, 0.06),
                rng.between(0.0, 6.0),
            ],
            blobs,
            noise: rng.between(0.0, 0.04),
        }
    }

    fn color(&self, class: u32, at: [f64; 2]) -> [f64; 3] {
        let [dx, dy] = [(at[0] - self.center[0]) / self.radius, (at[1] - self.center[1]) / self.radius];
        let [cos, sin] = self.rotation;
        let local = [dx * cos + dy * sin, dy * cos - dx * sin];
        if inside(class, local) {
            return self.shape_color;
        }
        for (center, radius, color) in &self.blobs {
            if (at[0] - center[0]).hypot(at[1] - center[1]) < *radius {
                return *color;
            }
        }
        let along = (at[0] - 0.5) * self.gradient[0] + (at[1] - 0.5) * self.gradient[1] + 0.5;
        let [fx, fy, depth, phase] = self.texture;
        let ripple = depth * (at[0] * fx + at[1] * fy + phase).sin();
        std::array::from_fn(|c| {
            self.background[0][c] * (1.0 - along) + self.background[1][c] * along + ripple
        })
    }
}

/// Whether a point, in units of the shape's radius, lies in the shape.
fn inside(class: u32, [x, y]: [f64; 2]) -> bool {
    let r = x.hypot(y);
    let box_distance = x.abs().max(y.abs());
    match class {
        0 => r < 0.85,
        1 => (0.55..0.95).contains(&r),
        2 => box_distance < 0.75,
        3 => (0.5..0.85).contains(&box_distance),
        4 => y < 0.7 && y > 1.9 * x.abs() - 0.95,
        5 => box_distance < 0.95 && x.abs().min(y.abs()) < 0.24,
        6 => {
            let angle = y.atan2(x);
            r < 0.65 + 0.32 * (5.0 * angle).cos()
        }
        7 => box_distance < 0.9 && ((y + 0.9) / 0.36).floor() as i32 % 2 == 0,
        8 => {
            let cell = |v: f64| (v + 0.9).rem_euclid(0.6) - 0.3;
            box_distance < 0.9 && cell(x).hypot(cell(y)) < 0.22
        }
        _ => r < 0.9 && (x - 0.42).hypot(y) > 0.72,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_repeat_and_differ_and_classes_are_even() {
        assert_eq!(image(1, 5, 16), image(1, 5, 16));
        assert_ne!(image(1, 5, 16).1, image(2, 5, 16).1);
        let mut counts = [0; 10];
        (0..2000).for_each(|i| counts[image(1, i, 1).0 as usize] += 1);
        assert!(counts.iter().all(|n| (140..260).contains(n)), "{counts:?}");
    }

    /// Mean color and mean brightness say next to nothing of the class: over many images the class
    /// means of each channel lie within a few levels of one another.
    #[test]
    fn color_does_not_tell_the_class() {
        let mut sums = [[0.0f64; 3]; 10];
        let mut counts = [0.0f64; 10];
        for i in 0..4000 {
            let (class, pixels) = image(3, i, 8);
            counts[class as usize] += 1.0;
            for pixel in pixels.chunks_exact(3) {
                for (sum, value) in sums[class as usize].iter_mut().zip(pixel) {
                    *sum += f64::from(*value) / 64.0;
                }
            }
        }
        for channel in 0..3 {
            let means: Vec<f64> = sums.iter().zip(counts).map(|(sum, n)| sum[channel] / n).collect();
            let (low, high) = means.iter().fold((f64::MAX, f64::MIN), |(l, h), m| (l.min(*m), h.max(*m)));
            assert!(high - low < 25.0, "channel {channel}: {means:?}");
        }
    }
}
