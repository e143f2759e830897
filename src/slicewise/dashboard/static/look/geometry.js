/** The geometry of a GPU model: open windows, the score F and its parts, stranded slices. */

/**
 * @typedef {{name: string, size: number, compute: number, memory_gb: number, starts: number[],
 *   variant_of: string | null, uses?: Record<string, number>}} Profile
 * @typedef {{profile: string, start: number, size: number, allocation?: string | null,
 *   tenant?: string | null, since?: number | null, phase?: string | null, born?: number}} Instance
 */

export class Geometry {
  /**
   * @param {{name: string, slices: number, compute_slices: number, profiles: Profile[],
   *   budgets?: Record<string, number>}} model
   */
  constructor(model) {
    this.model = model.name;
    this.slices = model.slices;
    const others = Object.keys(model.budgets ?? {});
    /** Budgets beyond slices, compute first: the total, and the share of each profile. */
    this.budgets = [model.compute_slices, ...others.map((name) => model.budgets?.[name] ?? 0)];
    /** @type {(profile: Profile) => number[]} */
    this.needs = (profile) => [profile.compute, ...others.map((name) => profile.uses?.[name] ?? 0)];
    /** @type {Map<string, Profile>} */
    this.profiles = new Map(model.profiles.map((profile) => [profile.name, profile]));
    this.plain = model.profiles.filter((profile) => profile.variant_of === null);
    this.full = (1 << this.slices) - 1;
    /** @type {Map<number, number>} */
    this._scores = new Map();
    /** @type {Map<string, number>} */
    this._stranded = new Map();
    this.worst = 0;
    for (let mask = 0; mask <= Math.min(this.full, 4095); mask += 1) {
      this.worst = Math.max(this.worst, this.score(mask));
    }
  }

  /** What instances take of each budget. @param {Instance[]} instances */
  usedBy(instances) {
    const used = this.budgets.map(() => 0);
    for (const one of instances) {
      const profile = this.profiles.get(one.profile);
      if (profile) this.needs(profile).forEach((need, budget) => { used[budget] += need; });
    }
    return used;
  }

  /** F, windows blocked in part. @param {number} mask */
  score(mask) {
    let score = this._scores.get(mask);
    if (score === undefined) {
      score = this.parts(mask).reduce((sum, part) => sum + part.adds, 0);
      this._scores.set(mask, score);
    }
    return score;
  }

  /**
   * How F comes about: by plain profile, the starts blocked in part, and what they add.
   * @param {number} mask
   */
  parts(mask) {
    const free = this.slices - bits(mask);
    return this.plain.map((profile) => {
      const blocked = profile.starts.filter((start) => {
        const taken = window(profile, start) & mask;
        return profile.size <= free && taken !== 0 && taken !== window(profile, start);
      });
      const open = profile.starts.filter((start) => (window(profile, start) & mask) === 0);
      return { profile, blocked, open, adds: profile.size * blocked.length };
    });
  }

  /**
   * The stranded slices, as a mask: free, enough, and of no use as they lie.
   * @param {number} mask
   * @param {number[]} used what is taken of each budget
   */
  stranded(mask, used) {
    const key = `${mask}:${used}`;
    let found = this._stranded.get(key);
    if (found === undefined) {
      found = this._findStranded(mask, used);
      this._stranded.set(key, found);
    }
    return found;
  }

  /** @param {number} mask @param {number[]} used */
  _findStranded(mask, used) {
    const free = this.slices - bits(mask);
    const fitting = this.plain.filter(
      (profile) => profile.size <= free
        && this.needs(profile).every((need, budget) => need <= this.budgets[budget] - used[budget]),
    );
    if (!fitting.length) return 0;
    const largest = Math.max(...fitting.map((profile) => profile.size));
    let covered = 0;
    let opens = false;
    for (const profile of fitting) {
      for (const start of profile.starts) {
        if ((window(profile, start) & mask) === 0) {
          covered |= window(profile, start);
          opens ||= profile.size === largest;
        }
      }
    }
    return this.full & ~mask & (opens ? ~covered : ~0);
  }
}

/** @param {Profile} profile @param {number} start */
function window(profile, start) {
  return ((1 << profile.size) - 1) << start;
}

/** @param {number} mask */
export function bits(mask) {
  let rest = mask;
  let found = 0;
  while (rest) {
    rest &= rest - 1;
    found += 1;
  }
  return found;
}

/** @param {Instance[]} instances */
export function maskOf(instances) {
  return instances.reduce((mask, one) => mask | (((1 << one.size) - 1) << one.start), 0);
}
