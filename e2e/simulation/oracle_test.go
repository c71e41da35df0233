// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"encoding/json"
	"net/netip"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// book is what the oracle remembers.
type book struct {
	fault      int // seq of the last one
	faultTime  time.Time
	tampered   int // seq of the last time that another program changed owned rules; 0: they were repaired since
	harmed     []string
	recordLost bool
	judged     [2]int // seq of the kernel, and of the world's claims, that were judged last
}

// decision is what the policies of all networks say of a packet.
type decision struct {
	masquerade bool
	drop       bool // a chain masquerades it and its guard drops it if it is not translated
}

// decide computes the decision by section 3.1 from one version of each network.
func decide(versions []*version, space string, src, dst netip.Addr) (d decision) {
	var chains []*chainSpec
	for _, v := range versions {
		if v != nil && !slices.Contains(chains, v.chain) {
			chains = append(chains, v.chain)
		}
	}
	for _, c := range chains {
		if src.Is6() && !c.ipv6 || c.scoped && !covers(c.scope(), src) {
			continue
		}
		longest, masquerade := -1, true
		consider := func(prefixes []netip.Prefix, m bool) {
			for _, p := range prefixes {
				if p.Contains(dst) && p.Bits() > longest {
					longest, masquerade = p.Bits(), m
				}
			}
		}
		consider(linkLocal, false)
		exemptPod := false
		for _, v := range versions {
			if v != nil && v.chain == c {
				consider(v.exempt, false)
				consider(v.masq, true)
				exemptPod = exemptPod || space != "" && slices.Contains(v.spaces, space)
			}
		}
		if masquerade && !exemptPod {
			d.masquerade = true
			d.drop = d.drop || c.guard == "drop" && (c.scoped || slices.ContainsFunc(versions, func(v *version) bool {
				return v != nil && v.chain == c && v.net.address(src.Is6(), 0).Masked().Contains(src) // learned from ADDs
			}))
		}
	}
	return d
}

func covers(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// combinations returns every set of versions that may be in force.
func (w *world) combinations() [][]*version {
	all := [][]*version{nil}
	for _, n := range w.networks {
		var may []*version
		for _, c := range n.claims {
			if !slices.Contains(may, c.v) {
				may = append(may, c.v)
			}
		}
		if len(may) == 0 {
			may = []*version{nil}
		}
		var next [][]*version
		for _, combination := range all {
			for _, v := range may {
				next = append(next, append(slices.Clip(combination), v))
			}
		}
		all = next
	}
	return all
}

// listed reports whether a policy that is certainly in force exempts the namespace of a pod.
func (w *world) listed(p *pod) bool {
	return slices.ContainsFunc(w.networks, func(n *network) bool {
		return !slices.ContainsFunc(n.claims, func(c claim) bool { return c.v == nil || !slices.Contains(c.v.spaces, p.space) })
	})
}

// probes returns the destinations that tell policies apart.
func (w *world) probes() []netip.Addr {
	all := slices.Clone(destinations)
	for _, n := range w.networks {
		for _, v := range n.versions {
			for _, p := range v.marks() {
				all = append(all, p.Addr())
			}
		}
	}
	return all
}

// judge judges the packets of every running pod, and the record, after each effect.
func (w *world) judge() {
	now := [2]int{w.kernel.seq, w.seq}
	if w.objection != "" || w.book.judged[0] == now[0] && w.last != nil && !w.changed() {
		return
	}
	w.book.judged = now
	w.judgeRecord()
	w.judgePackets()
}

// changed reports whether the expectations may have changed since the last judgement.
func (w *world) changed() bool {
	return slices.ContainsFunc(w.running, func(p *process) bool { return p.end > w.book.judged[1] || p.start > w.book.judged[1] })
}

func (w *world) judgePackets() {
	combinations, probes := w.combinations(), w.probes()
	for _, p := range w.pods {
		if p.phase != running {
			continue
		}
		for _, src := range p.addresses {
			for _, dst := range probes {
				if src.Is4() != dst.Is4() {
					continue
				}
				got := w.kernel.packet(src, dst, "eth0")
				var masquerade, exempt, drop bool
				for _, c := range combinations {
					d := decide(c, p.space, src, dst)
					if p.unrecorded {
						masquerade = masquerade || decide(c, "", src, dst).masquerade
					}
					masquerade, exempt, drop = masquerade || d.masquerade, exempt || !d.masquerade, drop || d.drop
				}
				w.counts["packets"]++
				tampered := w.book.tampered > 0
				switch {
				case got.dropped && (!tampered || !drop):
					w.object("%s: a packet of %s (%s) to %s is dropped, which may be: masqueraded %v, not masqueraded %v", p.net.name, p.id(p.container), src, dst, masquerade, exempt)
				case tampered || got.dropped:
				case got.translated && !masquerade:
					w.object("%s: a packet of %s (%s, namespace %q) to %s is masqueraded, and no policy says so: %v", p.net.name, p.id(p.container), src, p.space, dst, combinations)
				case !got.translated && !exempt:
					w.object("%s: a packet of %s (%s, namespace %q) to %s is not masqueraded, and every policy says so: %v", p.net.name, p.id(p.container), src, p.space, dst, combinations)
				}
			}
		}
	}
}

// judgeRecord compares the owned chains in the kernel with the record: nothing is there that is not on record.
func (w *world) judgeRecord() {
	var record struct {
		Boot   string
		Chains []struct {
			Chain           string
			Family, Backend string
			Variant         string
		}
	}
	text, is := w.machine.ReadFile(dataDir + "/record.json")
	if is && json.Unmarshal([]byte(text), &record) != nil || !is && w.book.recordLost {
		return // the scenario has damaged or removed it
	}
	w.book.recordLost = false
	for choice, chains := range w.kernel.chains {
		for ref := range chains {
			found := false
			for _, c := range record.Chains {
				found = found || c.Chain == ref.Chain && c.Family == string(ref.Family) && c.Backend == string(choice.Backend) && c.Variant == choice.Variant
			}
			if !found {
				w.object("chain %s (%s) is in the kernel (%s) and not on record: %s", ref.Chain, ref.Family, choice, text)
			}
		}
	}
}

// repaired takes note that a process that passed has repaired what others changed before it began.
func (w *world) repaired(p *process) {
	if p.start > w.book.tampered && !p.faulty {
		w.book.tampered = 0
	}
}

func (w *world) fault() {
	w.book.fault, w.book.faultTime = w.seq, time.Now()
}

// healthy reports whether nothing could have failed since a process began.
func (w *world) healthy(p *process) bool {
	m := w.machine
	return w.book.fault < p.start && !m.Full && !m.ReadOnly && !m.Broken && !p.faulty
}

// refused reports whether the kernel may refuse a policy that is, or may be, in force.
func (w *world) refused() bool {
	return w.kernel.refuses && slices.ContainsFunc(w.networks, func(n *network) bool {
		return slices.ContainsFunc(n.claims, func(c claim) bool { return c.v != nil && c.v.refused })
	})
}

func (w *world) judgeADD(p *process, v *version) {
	if !p.returned || p.err == nil {
		return
	}
	switch code := codeOf(p.err); {
	case !w.healthy(p), w.refused(), v.refused && w.kernel.refuses:
	case code == 11 && !w.alone(p):
	default:
		w.object("%s fails although nothing else does: %v", p.Name, p.err)
	}
}

func (w *world) judgeSync(p *process, healthy bool, report *reconcile.Report) {
	const backoff = 70 * time.Second
	if !healthy && w.healthy(p) && (w.book.fault == 0 || time.Since(w.book.faultTime) > backoff) && w.alone(p) && !w.refused() && !w.harmed() && w.book.tampered == 0 {
		w.object("a sync is not ready although nothing fails: %v", report.Problems[0].Err)
	}
}

// quiet lets everything end, repairs the world and judges what must be right then.
func (w *world) quiet(o *op) {
	all := func() bool { return !slices.ContainsFunc(w.running, func(p *process) bool { return !p.ended() }) }
	w.until(all)
	m := w.machine
	if m.Full || m.ReadOnly || m.Broken || w.kernel.refuses {
		m.Full, m.ReadOnly, m.Broken, w.kernel.refuses = false, false, false, false
		w.fault()
	}
	w.seq++
	wait := func(p *process) {
		if p != nil && w.objection == "" {
			w.until(p.ended)
		}
	}
	step := func(kind string) *op { return &op{kind: kind, wait: true} }
	if w.harmed() { // the subnets of pods are lost, too
		for _, n := range w.networks {
			if n.conf != nil {
				w.pods[len(w.pods)-1].phase = gone
				wait(w.add(&op{kind: "add", pod: len(w.pods) - 1, wait: true}, n, n.conf))
			}
		}
	}
	time.Sleep(2 * time.Minute) // backoffs
	wait(w.sync(step("sync")))
	if w.objection != "" {
		return
	}
	if w.harmed() { // what no conflist states is written again by an ADD only
		return
	}
	if w.book.tampered > 0 {
		w.object("after quiet and a sync the rules are not repaired")
	}
	wait(w.sync(step("sync"))) // publishes
	writes, seq := m.Writes, w.kernel.seq
	wait(w.sync(step("sync")))
	if w.objection == "" && (m.Writes != writes || w.kernel.seq != seq) {
		w.object("a second sync writes: %d times to files, %d times to the kernel", m.Writes-writes, w.kernel.seq-seq)
	}
	w.judgeGuards()
	for _, n := range w.networks {
		if n.conf == nil || w.objection != "" {
			continue
		}
		p := w.ask(&op{kind: "status", net: n.number, wait: true}, n)
		if wait(p); p != nil && w.objection == "" && p.err != nil {
			w.object("STATUS of %s fails on a node that is right: %v", n.name, p.err)
		}
	}
	for _, pod := range w.pods {
		if w.objection != "" || pod.phase != running {
			continue
		}
		p := w.ask(&op{kind: "check", pod: pod.number, wait: true}, pod.net)
		if wait(p); p != nil && w.objection == "" && p.err != nil {
			w.object("CHECK of %s fails on a node that is right: %v", pod.id(pod.container), p.err)
		}
	}
	_ = o
}

// judgeGuards compares what guards would drop, if no rule translated it, with the policies.
func (w *world) judgeGuards() {
	combinations := w.combinations()
	if w.objection != "" || len(combinations) > 1 || w.kernel.noGuards {
		return
	}
	without := *w.kernel
	without.chains = nil
	without.guards = slices.Clone(w.kernel.guards)
	for i := range without.guards {
		without.guards[i].Bound, without.guards[i].ExemptPods = nil, nil
	}
	for _, p := range w.pods {
		for _, src := range p.addresses {
			for _, dst := range w.probes() {
				// The subnet of a pod that started while the disk was bad is not on record.
				if w.book.fault > 0 && !p.net.versions[0].chain.scoped || p.phase != running || src.Is4() != dst.Is4() {
					continue
				}
				want := decide(combinations[0], p.space, src, dst).drop
				if got := without.packet(src, dst, "eth0").dropped; got != want {
					w.object("the guard of a packet of %s (%s) to %s: drops %v, and the policy says %v", p.id(p.container), src, dst, got, want)
				}
			}
		}
	}
}
