// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// book is what the oracle remembers.
type book struct {
	fault         int // seq of the last one
	faultTime     time.Time
	tampered      int      // seq of the last time that another program changed owned rules; 0: they were repaired since
	orphans       []string // chains that were in the kernel when the record was damaged or lost
	guardTampered bool     // its guard may drop anything
	harmed        []string
	unruled       bool          // nothing has passed without faults since the boot
	ahead         time.Duration // how far times of files can be ahead of the clock, by steps of a minute
	stuck         bool          // a stale chain could not be removed, and masquerades as before until a reconciler's sync
	recordLost    bool
	disrupted     int       // seq of the last thing that another program did
	addressed     int       // seq of the last change of the node's addresses
	resetsLost    bool      // those that were due may be, after a fault of this boot
	warned        time.Time // when a walk failed last: the next one is 10 s later
	walked        time.Time // when the last one began
	half          int       // seq when a process that was killed or failed may have stored a policy and not written its rules
	unfinished    bool      // a walk through the connections may be: then it is repeated
	fought        time.Time // when another program stopped to fight
	frozen        time.Time // when processes were frozen last, maybe with the lock held
	disturbed     time.Time // when something happened last that a reconciler follows
	settled       bool      // and it was judged since, the connections excepted
	quietJudged   bool      // and those
	filesJudged   int       // writes of the machine when the managed conflist was read
	judged        [2]int    // seq of the kernel, and of the world's claims, that were judged last
}

// decision is what the policies of all networks say of a packet.
type decision struct {
	masquerade bool
	drop       bool         // a chain masquerades it and its guard drops it if it is not translated
	from       []netip.Addr // by outputAddresses of one of the chains
}

// output returns the address that pods leave with, or none. No item of a scenario has two addresses.
func (c *chainSpec) output(addresses []policy.NodeAddress, src netip.Addr) netip.Addr {
	for _, item := range c.Outputs {
		is := func(a policy.NodeAddress) bool { return item.Contains(a.Address) && a.Address.Is4() == src.Is4() }
		if i := slices.IndexFunc(addresses, is); i >= 0 {
			return addresses[i].Address
		}
	}
	return netip.Addr{}
}

// decide computes the decision by section 3.1 from one version of each network.
func decide(versions []*version, addresses []policy.NodeAddress, space string, src, dst netip.Addr) (d decision) {
	versions = slices.DeleteFunc(slices.Clone(versions), func(v *version) bool { return v == nil })
	for i, v := range versions {
		of := func(o *version) bool { return o.Chain == v.Chain }
		if slices.IndexFunc(versions, of) < i || src.Is6() && !v.IPv6 || v.Scope != nil && !covers(v.Scope, src) {
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
		ofNetwork := func(o *version) bool { return of(o) && !o.net.agent }
		if slices.ContainsFunc(versions, ofNetwork) {
			consider(multicast, false)
		}
		exemptPod, guards := false, v.Scope != nil
		for _, o := range versions {
			if of(o) {
				consider(o.Exempt, false)
				consider(o.Masq, true)
				exemptPod = exemptPod || space != "" && slices.Contains(o.Spaces, space)
				guards = guards || o.net.learns() && o.net.hasSubnetOf(src) // learned from ADDs
			}
		}
		if masquerade && !exemptPod {
			d.masquerade, d.from = true, append(d.from, v.output(addresses, src))
			d.drop = d.drop || v.Guard == "drop" && guards
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

// allProbes returns the destinations that tell policies apart.
func (s *scenario) allProbes() []netip.Addr {
	all := slices.Clone(destinations)
	for _, n := range s.nets {
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
	b := &w.book
	changed := func(p *process) bool { return p.end > b.judged[1] || p.start > b.judged[1] } // then expectations may have, too
	if w.objection != "" || b.judged[0] == w.kernel.seq && w.last != nil && !slices.ContainsFunc(w.running, changed) {
		return
	}
	b.judged = [2]int{w.kernel.seq, w.seq}
	w.judgeRecord()
	w.judgePackets()
}

func (w *world) judgePackets() {
	for _, p := range w.pods {
		w.objectTo(p, w.book.tampered > 0)
	}
}

// packets returns packets of a running pod that tell policies apart, until something is wrong.
func (w *world) packets(p *pod) iter.Seq2[netip.Addr, netip.Addr] {
	return func(yield func(src, dst netip.Addr) bool) {
		for _, src := range p.addresses {
			for _, dst := range w.probes {
				if p.phase == running && src.Is4() == dst.Is4() && (w.objection != "" || !yield(src, dst)) {
					return
				}
			}
		}
	}
}

// expectation is the decisions of each combination of versions about the packets of a pod, in their order.
type expectation struct {
	combinations [][]*version
	container    int
	harmed       bool
	decisions    [][]decision
}

// expect returns the expectation of a pod, which changes seldom.
func (w *world) expect(p *pod) *expectation {
	x := &p.expectation
	combinations := w.combinations()
	if x.container == p.container && x.harmed == p.harmed && slices.EqualFunc(x.combinations, combinations, slices.Equal[[]*version]) {
		return x
	}
	*x = expectation{combinations: combinations, container: p.container, harmed: p.harmed}
	spaces := []string{p.space}
	if p.harmed { // nor is a pod that began while a document was damaged, as its chain stayed as it was
		spaces = append(spaces, "")
	}
	for _, c := range combinations {
		for _, space := range spaces {
			var of []decision
			for src, dst := range w.packets(p) {
				of = append(of, decide(c, nil, space, src, dst))
			}
			x.decisions = append(x.decisions, of)
		}
	}
	return x
}

// moves reports whether a network may have another chain or backend: then its packets may meet both.
func (w *world) moves() bool {
	return w.some(func(n *network) bool {
		var first *version
		return n.may(func(v *version) bool {
			first = cmp.Or(first, v)
			return v != nil && (v.Chain != first.Chain || v.Backend != first.Backend)
		})
	})
}

// objectTo objects to wrong packets of a pod: those that follow no policy, and those that follow different ones at the same
// time. While another program's change is not repaired, nothing is dropped that no policy drops, and all else may be wrong.
func (w *world) objectTo(p *pod, tampered bool) {
	if p.phase != running {
		return
	}
	x := w.expect(p)
	stuck := w.book.stuck || w.refused() && w.hasStale() // a chain that is refused may be one of those with a new name
	together := !w.book.stuck && !w.book.unruled && !w.refused() && !p.harmed && !w.harmed() && !w.moves()
	var of netip.Addr
	var contradicted []bool // by packets from that address, for each combination
	i := -1
	for src, dst := range w.packets(p) {
		if i++; src != of {
			of, contradicted = src, make([]bool, len(x.decisions))
		}
		got := w.kernel.packet(src, dst)
		masquerade, drop := stuck, false
		// After a boot, a chain is missing that the kernel refuses or whose first write failed; rules that stay beside a damaged document may still
		// exempt the former pod of the address; and a chain that is not on record goes before the one that takes its place in another backend.
		exempt := w.refused() || w.book.unruled || p.harmed && p.moved || len(w.book.orphans) > 0 && w.moves()
		for j := range x.decisions {
			d := &x.decisions[j][i]
			masquerade, exempt, drop = masquerade || d.masquerade, exempt || !d.masquerade, drop || d.drop
			contradicted[j] = contradicted[j] || got.translated != d.masquerade
		}
		w.counts["packets"]++
		object := func(what string) {
			w.object("%s: a packet of %s (%s, namespace %q) to %s is %s: %v", p.net.name, p.id(p.container), src, p.space, dst, what, x.combinations)
		}
		switch {
		case got.dropped && drop && (w.book.unruled || len(w.book.orphans) > 0 || p.net.mayNot()):
			// The node restarted, or its document or the record was lost, so the guard comes as before the first rules again.
		case got.dropped && !tampered && !w.book.unruled && !w.refused() && !p.harmed && !w.harmed():
			object("dropped although its chain has rules")
		case got.dropped && (!tampered || !drop && !w.book.guardTampered):
			object(fmt.Sprintf("dropped, which may be: masqueraded %v, not masqueraded %v", masquerade, exempt))
		case tampered || got.dropped:
		case got.translated && !masquerade:
			object("masqueraded, and no policy says so")
		case !got.translated && !exempt:
			object("not masqueraded, and every policy says so")
		case together && !slices.Contains(contradicted, false):
			object(fmt.Sprintf("translated %v, and no policy says so and what became of the packets to other destinations", got.translated))
		}
	}
}

// judgeOutputs judges the addresses that pods leave with, when the policy is certain.
func (w *world) judgeOutputs(pods ...*pod) {
	combinations := w.combinations()
	if len(combinations) > 1 || w.book.tampered > 0 || w.book.stuck {
		return
	}
	for _, p := range pods {
		for src, dst := range w.packets(p) {
			got, want := w.kernel.packet(src, dst), decide(combinations[0], w.kernel.addresses, p.space, src, dst).from
			if !p.harmed && got.translated && !slices.Contains(want, got.from) {
				w.object("%s: a packet of %s (%s) to %s leaves with address %s instead of %s", p.net.name, p.id(p.container), src, dst, got.from, want)
			}
		}
	}
}

// judgeDeletion judges whether a connection may be deleted: an address of the node that it left with is gone, its pod has
// ended (so that its address is in no namespace), its translation contradicts a policy that may be in force, or its address has
// passed to a pod of another namespace: ip-masq cannot tell the connections of the two, and finds out when a list of
// namespaces comes into force. A walk that could not be taken off the record is repeated.
func (w *world) judgeDeletion(c *connection) {
	gone := w.book.unfinished || w.book.fault > 0 || c.left || c.translated() && !w.kernel.IsLocal(c.ReplyDst) || c.pod.phase != running || c.pod.moved || c.pod.harmed ||
		!slices.Contains(c.pod.addresses, c.Src)
	for _, versions := range w.combinations() {
		gone = gone || decide(versions, nil, c.space, c.Src, c.Dst).masquerade != c.translated()
	}
	if w.counts["deleted connections"]++; !gone {
		w.object("a connection of %s (%s) to %s that is %v is deleted, and no policy contradicts it", c.pod.id(c.container), c.Src, c.Dst, c)
	}
}

func (c *connection) String() string {
	if c.translated() {
		return "masqueraded to " + c.ReplyDst.String()
	}
	return "not masqueraded"
}

// judgePassed judges the connections of the former pods of an address when an ADD of another one has returned.
func (w *world) judgePassed(p *process, pod *pod) {
	combinations := w.combinations()
	if len(combinations) > 1 || pod.harmed || w.book.resetsLost || p.warnsOfConnections() || time.Since(w.book.warned) < 10*time.Second { // an ADD before may have lost its reset, and said so
		return
	}
	for _, c := range w.kernel.connections {
		if !w.book.unfinished && len(w.reconcilers()) == 0 { // or the walk waits, as one before failed, or is the reconciler's
			w.judgeLeft(&c, p.start)
		}
		if c.pod != pod || c.container == pod.container || !slices.Contains(pod.addresses, c.Src) {
			continue
		}
		was, is := decide(combinations[0], nil, c.space, c.Src, c.Dst).masquerade, decide(combinations[0], nil, pod.space, c.Src, c.Dst).masquerade
		changed := w.some(func(n *network) bool { return n.since > c.began }) || !slices.Equal(c.policies, combinations[0])
		if was != is && c.translated() != is && !changed { // or the list may be newer than the former pod
			w.object("a connection of %s (%s, namespace %q) to %s outlives the ADD of %s (namespace %q)", c.pod.id(c.container), c.Src, c.space, c.Dst, pod.id(pod.container), pod.space)
		}
	}
	if len(w.reconcilers()) == 0 && time.Since(p.walked) > 10*time.Second { // or the walk waits, as another one was just made
		w.judgeConnections()
	}
}

// judgeLeft judges a connection that ends when the address that it leaves with is gone.
func (w *world) judgeLeft(c *connection, since int) {
	if c.translated() && !w.kernel.IsLocal(c.ReplyDst) && w.book.addressed < since && !c.stale {
		w.object("a connection of %s (%s) to %s outlives the address %s, which it leaves with", c.pod.id(c.container), c.Src, c.Dst, c.ReplyDst)
	}
}

// judgeConnections judges whether connections that contradict the policy were deleted.
func (w *world) judgeConnections() {
	combinations := w.combinations()
	if len(combinations) > 1 || w.book.resetsLost {
		return
	}
	changes := func(v *version) bool { return v != nil && (v.Spaces != nil || v.Outputs != nil) }
	for _, c := range w.kernel.connections {
		w.judgeLeft(&c, w.seq)
		if c.pod.harmed || !slices.Contains(c.pod.addresses, c.Src) { // or a former container may hold that address
			continue
		}
		d := decide(combinations[0], nil, c.pod.space, c.Src, c.Dst)
		resets := func(v *version) bool {
			x := v.chainSpec
			return (x.Stale == "reset" || x.Stale == "" && x.Guard == "drop") && (covers(x.Scope, c.Src) || v.net.learns() && v.net == c.pod.net.netSpec) &&
				!slices.ContainsFunc(v.net.versions, func(o *version) bool { return o.chainSpec != x })
		}
		keeps := func(v *version) bool { // another chain may keep the connections of its verdict
			return v != nil && !slices.ContainsFunc(combinations[0], func(o *version) bool { return o != nil && o.Chain == v.Chain && resets(o) })
		}
		// A repair deletes connections that are not translated only, and none where it comes with a change of exempt pods or addresses.
		repaired := c.tampered && (!d.masquerade || c.between || w.some(func(n *network) bool { return n.may(changes) }))
		if c.pod.phase == running && c.translated() != d.masquerade && !repaired && !slices.ContainsFunc(combinations[0], keeps) {
			w.object("a connection of %s (%s) to %s stays %v, which every policy contradicts", c.pod.id(c.container), c.Src, c.Dst, &c)
		}
	}
}

// judgeRecord compares the owned chains in the kernel with the record: nothing is there that is not on record.
func (w *world) judgeRecord() {
	var record struct {
		Boot   string
		Chains []struct{ Chain, Family, Backend, Variant string }
	}
	text, is := w.machine.ReadFile(dataDir + "/record.json")
	if is && json.Unmarshal([]byte(text), &record) != nil || !is && w.book.recordLost {
		return // the scenario has damaged or removed it
	}
	if boot, _ := w.machine.ReadFile(bootFile); record.Boot != strings.TrimSpace(boot) {
		record.Chains = nil
	}
	w.book.recordLost = false
	for choice, chains := range w.kernel.Chains {
		for ref := range chains {
			found := slices.Contains(w.book.orphans, ref.Chain)
			for _, c := range record.Chains {
				found = found || c.Chain == ref.Chain && c.Family == string(ref.Family) && c.Backend == string(choice.Backend) && c.Variant == choice.Variant
			}
			if !found {
				w.object("chain %s (%s) is in the kernel (%s) and not on record: %v", ref.Chain, ref.Family, choice, record.Chains)
			}
		}
	}
}

// repaired takes note that a process that passed has repaired what others changed before it began.
func (w *world) repaired(p *process) {
	if w.refused() { // beside a chain of others that the kernel refuses an ADD passes
		return
	}
	if p.start > w.book.fault && !p.faulty {
		w.book.unruled, w.book.half = false, 0
	}
	unrepaired := w.book.guardTampered && w.kernel.refuses == "guards" // an ADD of a network without a guard passes
	if p.start > w.book.tampered && !p.faulty && !unrepaired {
		w.book.tampered, w.book.guardTampered = 0, false
	}
}

// staleRemoved takes note that a sync has removed stale chains: all but those that a lost record had. These stay as another
// program changed them, if a document may be gone.
func (w *world) staleRemoved() {
	stays := func(chain string) bool {
		return w.kernel.has(chain) && (!w.wanted(chain) || w.some((*network).mayNot))
	}
	w.book.stuck = slices.ContainsFunc(w.book.orphans, stays)
}

// wanted reports whether a policy that may be in force is about a chain.
func (w *world) wanted(chain string) bool {
	names := func(v *version) bool { return v != nil && v.Chain == chain }
	return w.some(func(n *network) bool { return n.may(names) })
}

// hasStale reports whether the kernel has a chain that no policy wants.
func (w *world) hasStale() bool {
	return w.kernel.some(func(ref policy.ChainFamily) bool { return !w.wanted(ref.Chain) })
}

func (w *world) fault() {
	w.disturbed()
	w.book.fault, w.book.faultTime, w.book.resetsLost = w.seq, time.Now(), true
}

// disturbed takes note that something happened.
func (w *world) disturbed() {
	w.seq++
	w.book.disturbed, w.book.settled, w.book.quietJudged = time.Now(), false, false
}

// healthy reports whether nothing could have failed since a process began.
func (w *world) healthy(p *process) bool {
	return w.book.fault < p.start && !w.machine.Bad() && !p.faulty
}

// refused reports whether the kernel may refuse a policy that is, or may be, in force, or that entry_file states.
func (w *world) refused() bool {
	isRefused := func(v *version) bool { return v != nil && v.refused }
	return w.kernel.refuses == "prefixes" && w.some(func(n *network) bool { return n.may(isRefused) || isRefused(n.stated) })
}

func (w *world) judgeADD(p *process, v *version, pod *pod) {
	if !p.returned || !w.healthy(p) || w.refused() || v != nil && v.refused && w.kernel.refuses == "prefixes" || w.kernel.refuses == "guards" || w.scenario.admin && pod.net.since > p.start {
		return
	}
	switch {
	case v == nil: // plugin.toml asks for a conflist; beside one that cannot be parsed the stored policy stays
		if !w.bad() && !w.changedSince(p) && codeOf(p.err) != 7 {
			w.object("%s answers %v without a conflist of its network", p.Name, p.err)
		}
	case p.err == nil && w.alone(p) && !w.harmed():
		if _, is := w.machine.ReadFile(dataDir + "/record.json"); !is {
			w.object("%s passes without a record", p.Name)
		}
		w.judgePassed(p, pod)
		if w.book.addressed < p.start {
			w.judgeOutputs(pod)
		}
	case p.err != nil && (codeOf(p.err) != 11 || w.alone(p)) && w.counts["tampers"]-p.tampers < 2: // a run writes the same rules twice
		w.object("%s fails although nothing else does: %v", p.Name, p.err)
	}
}

// excused reports whether a report has only problems that the scenario states: files that cannot be parsed, and
// addresses that the node does not have.
func (w *world) excused(report *reconcile.Report) bool {
	return !slices.ContainsFunc(report.Problems, func(p reconcile.Problem) bool {
		switch p.Reason {
		case reconcile.ReasonSource, reconcile.ReasonState, reconcile.ReasonConflist:
			_, is := w.machine.ReadFile(w.networks[0].file())
			const flaps = 5
			return !w.bad() && (w.managed() == nil || is && w.managed().written < flaps)
		case reconcile.ReasonAddress:
			return len(w.kernel.addresses) == len(nodeAddresses)
		}
		return p.Reason != reconcile.ReasonPlugin
	})
}

// changedSince reports whether a file of the configuration has changed since a process began.
func (w *world) changedSince(p *process) bool {
	return w.some(func(n *network) bool { return n.since > p.start })
}

// judgeQuiet judges the node when nothing has happened for as long as an active reconciler may take, all else being right.
func (w *world) judgeQuiet() {
	m, p := w.machine, w.active()
	if w.book.quietJudged || p == nil || len(w.midway()) > 0 || !w.idle() || w.harmed() || w.refused() || m.Bad() || w.kernel.refuses == "guards" {
		return
	}
	patience := 4 * time.Second
	if w.scenario.legacy { // without events
		patience = 65 * time.Second
	}
	if w.book.fault > 0 && time.Since(w.book.faultTime) < 75*time.Second || // it backs off
		time.Since(w.book.fought) < 5*time.Minute ||
		time.Since(w.book.frozen) < time.Minute+patience ||
		time.Since(w.book.disturbed) < patience {
		return
	}
	if time.Since(w.book.disturbed) > 30*time.Second { // walks are 10 s apart
		w.book.quietJudged = true
		w.judgeConnections()
	}
	if w.book.settled {
		return
	}
	w.book.settled = true
	w.counts["quiet nodes"]++
	w.note("  log: %s", bytes.TrimSpace(p.log.Bytes()))
	if p.log.Reset(); !p.report.Ready() && !w.excused(p.report) {
		w.object("the reconciler is not ready although nothing fails: %v", p.report.Problems[0].Err)
	}
	w.book.tampered, w.book.guardTampered, w.book.unruled = 0, false, false
	w.judgeConflist()
	for _, n := range w.networks {
		if n.conf != nil {
			n.claims, n.nobody.phase = []claim{{n.conf, p}}, running
			w.recordEarly(n)
		}
	}
	w.staleRemoved()
	w.judgeRecord()
	w.judgePackets()
	w.judgeOutputs(w.pods...)
	w.judgeGuards()
}

// agree judges whether STATUS and an ADD in the same state agree.
func (w *world) agree(n *network) {
	if n.conf == nil || n.agent || !w.idle() || len(w.midway()) > 0 || n == w.managed() { // whose conflist a reconciler may be about to change
		return
	}
	w.armed = nil
	restores := w.some(w.half)
	m := w.machine
	disk := m.Disk
	status := w.do(&op{kind: "status", net: n.number, wait: true})
	if m.Bad() {
		add := w.addAgain(n)
		if add != nil && w.objection == "" && add.returned && add.err != nil && codeOf(add.err) != 11 && status.err == nil {
			w.object("an ADD of %s on a bad disk fails for another reason, and STATUS passes: %v", n.name, add.err)
		}
		w.do(&op{kind: "disk good"}) // STATUS is what an ADD answers then
	}
	add := w.addAgain(n)
	if disk != "good" {
		w.do(&op{kind: "disk " + disk})
	}
	if add == nil {
		return
	}
	switch {
	case restores:
	case w.objection != "" || !status.returned || !add.returned || slices.ContainsFunc(w.reconcilers(), func(p *process) bool { return p.last > status.start }):
	case status.err == nil && add.err != nil && w.kernel.refuses != "" && n.conf.guardsSubnets():
		// The kernel refuses a guard of the subnet that this ADD found, which STATUS does not know.
	case (status.err == nil) != (add.err == nil):
		w.object("STATUS and ADD of %s do not agree: %v, and %v", n.name, status.err, add.err)
	}
	w.counts["STATUS with ADD"]++
}

// guardsSubnets reports whether the guard tables have rules for the subnets that ADDs find.
func (v *version) guardsSubnets() bool {
	return v.net.learns() && (v.Guard != "" || v.EnforceExempt)
}

// half reports whether the document of a network is half dropped: a bad disk could neither remove nor restore it. The next
// lock on a good disk does.
func (w *world) half(n *network) bool {
	_, is := w.machine.ReadFile(n.document + ".dropped")
	return is
}

// addAgain is an ADD of the pod of no operation, which is in no namespace.
func (w *world) addAgain(n *network) *process {
	w.pods[most].phase = gone
	return w.do(&op{kind: "add", net: n.number, pod: most, number: 6, wait: true})
}

// quiet lets everything end, repairs the world and judges what must be right then.
func (w *world) quiet() {
	w.armed = nil
	for _, p := range w.running {
		p.event = event{}
	}
	w.until(w.idle)
	m := w.machine
	if m.Bad() {
		w.do(&op{kind: "disk good"})
	}
	if w.kernel.refuses != "" {
		w.do(&op{kind: "accept"})
	}
	for _, n := range w.networks {
		if n.bad {
			w.do(&op{kind: "conflist", net: n.number})
		}
	}
	w.disturbed()
	if w.harmed() { // the subnets of pods are lost, too
		for _, n := range w.networks {
			if n.conf != nil {
				w.addAgain(n)
			}
		}
	}
	if all := w.reconcilers(); len(all) > 0 {
		for _, p := range all {
			if active := w.active(); active != nil && p != active {
				p.stop() // one on standby looks each second
			}
		}
		w.pass(2*time.Minute, false) // backoffs
	}
	dropped := slices.DeleteFunc(slices.Clone(w.networks), func(n *network) bool { return n.conf != nil || !w.unused(n) })
	if len(dropped) > 0 {
		w.pass(11*time.Minute+w.book.ahead, false)
	}
	runs := len(w.reconcilers()) > 0
	again := func() {
		if runs {
			w.pass(70*time.Second, false)
		}
		if len(w.reconcilers()) == 0 { // or it was killed meanwhile
			w.do(&op{kind: "once", wait: true})
		}
	}
	if again(); w.harmed() { // what no conflist states is written again by an ADD only
		return
	}
	for _, n := range dropped {
		if _, is := m.ReadFile(n.document); !is && !w.half(n) && len(w.book.orphans) == 0 { // a former container may be attached for which no DEL came
			n.claims = []claim{{}}
			for i := range w.kernel.connections { // removing a chain deletes none
				w.kernel.connections[i].tampered = true
			}
		}
	}
	if w.book.tampered > 0 && (w.active() == nil || time.Since(w.book.fought) > 5*time.Minute) {
		w.object("after quiet and a sync the rules are not repaired")
	}
	w.book.unfinished = w.book.unfinished && len(w.reconcilers()) == 0 // else the ADD below repeats the walk
	if len(w.reconcilers()) == 0 {
		again() // records entries of conflists
	}
	writes, seq := m.Writes, w.kernel.seq
	if again(); m.Writes != writes || w.kernel.seq != seq {
		w.object("a second sync writes: %d times to files, %d times to the kernel", m.Writes-writes, w.kernel.seq-seq)
	}
	w.kernel.Torn = 1
	restored := w.some(w.half)
	if again(); w.kernel.seq != seq && !restored {
		w.object("a sync repairs rules that a torn reading lacks")
	}
	w.judgeOutputs(w.pods...)
	w.judgeGuards()
	if i := slices.IndexFunc(w.networks, func(n *network) bool { return n.conf != nil && !n.agent }); i >= 0 && w.managed() == nil && len(w.reconcilers()) == 0 {
		w.pass(11*time.Second, false) // walks are 10 s apart
		w.addAgain(w.networks[i])
		w.judgeConnections()
	}
	right := func(o op) {
		w.kernel.Torn = 1
		if p := w.do(&o); p == nil {
			w.kernel.Torn = 0
		} else if p.err != nil {
			w.object("%s fails on a node that is right: %v", p.Name, p.err)
		}
	}
	for _, n := range w.networks {
		if _, is := m.ReadFile(n.file()); is {
			right(op{kind: "status", net: n.number, wait: true})
		}
	}
	for _, pod := range w.pods {
		if pod.container > 0 && !pod.harmed && (!w.scenario.admin || pod.net.conf != nil) {
			right(op{kind: "check", pod: pod.number, wait: true})
		}
	}
}

// judgeGuards compares what guards would drop, if no rule translated it, with the policies.
func (w *world) judgeGuards() {
	combinations := w.combinations()
	if len(combinations) > 1 || w.kernel.refuses == "guards" {
		return
	}
	filter := *w.kernel.Kernel
	filter.Chains = nil
	filter.Guards = slices.Clone(filter.Guards)
	without := kernel{Kernel: &filter, addresses: w.kernel.addresses}
	for i := range filter.Guards {
		filter.Guards[i].Bound, filter.Guards[i].MoreBindings = nil, nil
	}
	for _, p := range w.pods {
		if p.phase != running || p.harmed {
			continue
		}
		// The subnet of a pod is not on record if a document was lost, if the pod had no ADD, or if it started with an
		// entry that was not in force any more.
		learnsSubnets := p.net.versions[0].Scope == nil
		mayLackSubnet := w.book.fault > 0 || p == p.net.nobody || p.early || p.entry != p.net.conf
		if learnsSubnets && mayLackSubnet {
			continue
		}
		for src, dst := range w.packets(p) {
			want := decide(combinations[0], nil, p.space, src, dst).drop
			if got := without.packet(src, dst).dropped; got != want {
				w.object("the guard of a packet of %s (%s) to %s: drops %v, and the policy says %v", p.id(p.container), src, dst, got, want)
			}
		}
	}
}
