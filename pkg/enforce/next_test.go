// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestNext takes the steps of random histories: policies of two or three chains change, other programs change rules, and
// each effect succeeds, fails, is overtaken, is unusable, or is the last one of a killed process. After each write the
// invariants of next hold, and no packet loses the verdict that the policies ask for. Then a run without faults repairs
// everything, and a second one writes nothing. The histories are always the same 10,000; -rapid.checks=100000 takes that many
// new ones.
func TestNext(t *testing.T) {
	lock, err := store.Open(t.TempDir() + "/state").Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lock.Release() }) // it wrote nothing
	history := func(t *rapid.T) { history(t, lock) }
	seed, checks := flag.Lookup("rapid.seed"), flag.Lookup("rapid.checks")
	if seed.Value.String() != seed.DefValue || checks.Value.String() != checks.DefValue {
		rapid.Check(t, history)
		return
	}
	defer func() { _ = seed.Value.Set(seed.DefValue) }() // it is a number
	for i := range 100 {
		if err := seed.Value.Set(strconv.Itoa(i + 1)); err != nil {
			t.Fatal(err)
		}
		rapid.Check(t, history) // of 100 histories
	}
}

func history(t *rapid.T, lock *store.Lock) {
	w := newWorld(t, lock)
	w.faults = false
	w.apply(w.sources(t), false)
	for range rapid.IntRange(1, 5).Draw(t, "operations") {
		w.faults = rapid.IntRange(0, 3).Draw(t, "faults") > 0
		w.fights = w.faults && rapid.IntRange(0, 19).Draw(t, "fights") == 0
		switch rapid.SampledFrom([]string{"apply", "apply", "apply", "incomplete", "sync", "tamper", "pods", "addresses"}).Draw(t, "operation") {
		case "apply":
			w.apply(w.sources(t), false)
		case "incomplete":
			w.apply(w.sources(t), true)
		case "sync":
			w.sync()
		case "tamper":
			w.tamper()
		case "pods":
			w.drawPods(t)
		case "addresses":
			w.drawAddresses(t)
		}
	}
	w.faults, w.fights = false, false
	s := w.sync()
	if !s.InSync() {
		t.Fatalf("a run without faults leaves %v, stale %v, guard %v, chains %v\n%s", s.Diff(), s.Stale, s.Guard.Err, s.Err("A"), w)
	}
	for used := range w.used {
		if policy.LeftNode(used.Address, w.node) && !w.returned[used.Address] && !w.unrecorded && !w.resets(used) {
			t.Fatalf("the connections of %v are not reset\n%s", used, w)
		}
	}
	written := w.written
	if s := w.sync(); s != nil && (!s.InSync() || w.written != written) {
		t.Fatalf("a second run writes %d times, and leaves %v\n%s", w.written-written, s.Diff(), w)
	}
}

// world is a kernel with other programs, and a dataDir.
type world struct {
	*Enforcer
	t       *rapid.T
	lock    *store.Lock
	faults  bool
	fights  bool // another program flushes the rules before each write
	packets []policy.Packet
	log     []any
	effects int // of the present run

	written, kernelWrites int // in all, and without those of documents and the record

	kernel    *netfiltertest.Kernel
	before    []wrong                     // the present write
	chains    map[policy.ChainFamily]bool // before it
	seen, now map[string]int              // how often each backend, and guards, had changed when they were read last, and until now
	torn      map[string]bool             // whether the last reading was torn
	read      map[string]bool             // whether a run has read each backend, and guards, since it wrote or was overtaken
	missed    bool                        // a reading of the run failed: it may write what is there
	noGuards  bool                        // the kernel lacks what they need, the run was told
	stuck     bool                        // a document could not be stored: the run writes nothing more

	node       []policy.NodeAddress
	used       map[store.ChainAddress]bool // those that rules had
	returned   map[netip.Addr]bool         // they left and came back: rules that were not written since may have them
	unrecorded bool                        // the record could not be written, and may lack resets
	repairs    bool                        // the run is a repair

	keeps map[netfilter.Choice]map[policy.ChainFamily]policy.Chain // the chains that stay as they are

	stored []policy.Source
	taken  bool // addresses were taken from another attachment

	planned store.Record // to be on record before the run writes anything else
	rec     store.Record
	target  []policy.Policy          // of the run
	wants   map[policy.Packet][]bool // whether each policy of the target masquerades the packet; see setTarget
}

// setTarget takes note of the policies of a run.
func (w *world) setTarget(policies []policy.Policy) {
	w.target, w.wants = policies, map[policy.Packet][]bool{}
}

// masqueradedBy returns whether each policy of the target masquerades a packet.
func (w *world) masqueradedBy(pkt policy.Packet) []bool {
	wants, known := w.wants[pkt]
	if !known {
		for _, p := range w.target {
			wants = append(wants, p.Decide(pkt).Action == policy.ActionMasquerade)
		}
		w.wants[pkt] = wants
	}
	return wants
}

// wrong is what the rules do to a packet, and must not.
type wrong struct {
	chain, what string
	packet      policy.Packet
}

// noneInPlace is what a removal must not cause where all could be read: the chain may be the one before it got another name.
const noneInPlace = "does not exist, nor one in its place"

type killed struct{}

var errFault = errors.New("fault")

func newWorld(t *rapid.T, lock *store.Lock) *world {
	w := &world{t: t, packets: judgedPackets(), lock: lock, kernel: netfiltertest.New(), seen: map[string]int{}, now: map[string]int{}, used: map[store.ChainAddress]bool{}, returned: map[netip.Addr]bool{}, torn: map[string]bool{}, read: map[string]bool{}}
	w.kernel.Before, w.kernel.After = w.begins, func(what string, details ...string) { w.kernelWrites++; w.wrote(what, details...) }
	w.Enforcer = &Enforcer{Dir: store.Open("/nonexistent"), Warn: func(error) {}, Addresses: func([]policy.Family) ([]policy.NodeAddress, error) {
		if w.faults && rapid.IntRange(0, 7).Draw(w.t, "addresses") == 0 {
			return nil, errFault
		}
		return w.node, nil
	}}
	w.Drivers = w.kernel.Drivers()
	w.rec.Boot = w.Dir.Boot()
	w.drawAddresses(t)
	return w
}

// String returns what was done, and what there is.
func (w *world) String() string {
	var lines []string
	for _, entry := range w.log {
		lines = append(lines, fmt.Sprintf("%+v", entry))
	}
	for choice, chains := range w.kernel.Chains {
		for _, c := range chains {
			lines = append(lines, fmt.Sprintf("%s: %s %s jumps %v rules %v", choice, c.Family, c.Name, c.Jumps, c.Rules))
		}
	}
	for _, g := range w.kernel.Guards {
		lines = append(lines, fmt.Sprintf("guard %s %s %s out %v pods %v exempt %v bound %v exempt pods %v", g.Chain, g.Family, g.Mode, g.Scope.Interfaces, g.Scope.Sources, g.Exempt, g.Bound, g.MoreBindings))
	}
	return strings.Join(lines, "\n")
}

// sources draws the sources of two or three networks.
func (w *world) sources(t *rapid.T) (all []policy.Source) {
	list := func(label string, from ...string) (prefixes []netip.Prefix) {
		for _, p := range from {
			if rapid.Bool().Draw(t, label) {
				prefixes = append(prefixes, netip.MustParsePrefix(p))
			}
		}
		return prefixes
	}
	boolean := func(label string) *bool { b := rapid.Bool().Draw(t, label); return &b }
	for i, name := range []string{"one", "two", "three"} {
		if rapid.IntRange(0, 4).Draw(t, "gone") == 0 {
			continue
		}
		p := policy.SourcePolicy{
			Chain:              []string{"A", "B", "C"}[i] + rapid.SampledFrom([]string{"", "", "-RENAMED"}).Draw(t, "chain"),
			NonMasqueradeCIDRs: append([]netip.Prefix{}, list("exempt", "10.0.0.0/8", "192.0.2.0/24", "198.51.100.0/24")...),
			EnableIPv6:         boolean("enableIPv6"),
			Guard:              rapid.SampledFrom([]policy.GuardMode{"", policy.GuardDrop, policy.GuardDrop, policy.GuardCount}).Draw(t, "guard"),
			EnforceExempt:      boolean("enforceExempt"),
			Backend:            rapid.SampledFrom([]policy.Backend{"", policy.NFTables, policy.IPTables}).Draw(t, "backend"),
			PodCIDRs:           list("podCIDRs", "10.88.0.0/16"),
		}
		if *p.EnableIPv6 {
			p.NonMasqueradeCIDRs = append(p.NonMasqueradeCIDRs, list("exempt", "2001:db8:1::/48", "2001:db8:2::/48")...)
			p.PodCIDRs = append(p.PodCIDRs, list("podCIDRs", "2001:db8:88::/64")...)
		}
		if rapid.IntRange(0, 2).Draw(t, "scope") == 0 {
			p.OutputInterfaces = []string{rapid.SampledFrom([]string{"eth0", "eth1", "eth+"}).Draw(t, "interface")}
		}
		if rapid.IntRange(0, 2).Draw(t, "namespaces") == 0 {
			p.NonMasqueradeNamespaces = []string{"exempt"}
		}
		if rapid.IntRange(0, 2).Draw(t, "outputAddresses") == 0 {
			p.OutputAddresses = policy.AddressItems{netip.MustParsePrefix("203.0.113.0/24")}
		}
		all = append(all, policy.Source{ID: policy.SourceID{Kind: policy.Network, Name: name}, Policy: p, Order: int64(i + 1)})
	}
	return all
}

// drawPods makes a pod exempt by its namespace, or no more, as an ADD or DEL records it.
func (w *world) drawPods(t *rapid.T) {
	w.rec.Namespaces, w.rec.Pods = []string{"exempt"}, nil
	for i, a := range []string{"10.88.0.9", "2001:db8:88::9"} {
		if rapid.Bool().Draw(t, "exempt pod") {
			w.rec.Pods = append(w.rec.Pods, store.ExemptPod{ExemptPod: policy.ExemptPod{Address: netip.MustParseAddr(a), Namespace: "exempt"}, At: int64(i)})
		}
	}
}

// drawAddresses changes the addresses of the node.
func (w *world) drawAddresses(t *rapid.T) {
	before := w.node
	w.node = []policy.NodeAddress{}
	for _, text := range []string{"203.0.113.1", "203.0.113.2"} {
		if on := rapid.SampledFrom([]string{"", "eth0", "eth0", "eth1"}).Draw(t, "address"); on != "" {
			a := netip.MustParseAddr(text)
			w.node = append(w.node, policy.NodeAddress{Interface: on, Address: a, Up: true})
			w.returned[a] = w.returned[a] || before != nil && policy.LeftNode(a, before)
		}
	}
	w.log = append(w.log, w.node)
}

// operate makes one run, and returns the State after it, or nil if the process was killed.
func (w *world) operate(what any, do func() *State) (s *State) {
	w.log, w.effects, w.missed, w.noGuards = append(w.log, what), 0, false, false
	defer func() {
		if x := recover(); x != nil {
			if _, dead := x.(killed); !dead {
				panic(x)
			}
			w.log, s = append(w.log, "killed"), nil
		}
	}()
	return do()
}

// apply changes the documents as an ADD or a sync does. Beside incomplete ones, which lack some that are stored, chains that
// exist stay as they are.
func (w *world) apply(sources []policy.Source, incomplete bool) {
	w.operate(fmt.Sprintf("apply, incomplete %t: %+v", incomplete, sources), func() *State {
		before := w.stored // networks that are gone were dropped before
		if w.keeps = nil; incomplete {
			w.keeps = w.kernelChains()
		} else {
			w.stored = slices.DeleteFunc(slices.Clone(w.stored), func(x policy.Source) bool { return store.State{Sources: sources}.Find(x.ID) == nil })
		}
		defer func() { w.keeps = nil }()
		stored := w.stored
		isStored := func(x policy.Source) bool {
			y := store.State{Sources: w.stored}.Find(x.ID)
			return y != nil && reflect.DeepEqual(*y, x)
		}
		p := &Proposal{Sources: sources, Changed: slices.DeleteFunc(slices.Clone(sources), isStored)}
		if incomplete {
			p.Lost = []store.FileError{{File: "lost", Err: errFault}}
		}
		s := w.ObserveProposal(context.Background(), p, w.rec)
		if w.setTarget(s.Policies()); incomplete {
			w.setTarget(nil)
		}
		s.changes(before, p)
		takes := !incomplete && rapid.Bool().Draw(w.t, "takes an address")
		if w.taken = false; takes {
			s.node.exempt.taken = map[store.Attachment][]netip.Addr{{ContainerID: "former"}: {netip.MustParseAddr("10.88.0.9")}}
		}
		rec, kernelWrites := w.rec, w.kernelWrites
		if s = w.run(s); s.progress.refused != nil && (!reflect.DeepEqual(stored, w.stored) || !reflect.DeepEqual(rec, w.rec)) {
			w.t.Fatalf("a refused policy is stored or on record\n%s", w)
		}
		if (s.progress.refused != nil || s.RecordErr != nil) && kernelWrites != w.kernelWrites {
			w.t.Fatalf("a change that fails has written to the kernel\n%s", w)
		}
		if s.RecordErr != nil && !slices.Equal(s.node.exempt.Pods, rec.Pods) && !s.ExemptionChanges() {
			w.t.Fatalf("the rules lack a change of exempt pods, which is not known\n%s", w)
		}
		if s.progress.refused == nil && s.RecordErr == nil && slices.ContainsFunc(sources, func(x policy.Source) bool { return !isStored(x) }) {
			w.t.Fatalf("a policy that is in force is not stored\n%s", w)
		}
		fails := func(c Chain) bool { return len(c.Policy.Namespaces) > 0 && s.Err(c.Policy.Chain) != nil }
		if failed := slices.ContainsFunc(s.Chains, fails); takes && !failed && !w.taken && s.progress.refused == nil && s.RecordErr == nil {
			w.t.Fatalf("an address is not taken\n%s", w)
		}
		if !w.faults && (s.progress.refused != nil || !s.InSync()) {
			w.t.Fatalf("a change without faults ends with %v, %v, stale %v, guard %v\n%s", s.progress.refused, s.Diff(), s.Stale, s.Guard.Err, w)
		}
		return s
	})
}

// sync repairs the rules.
func (w *world) sync() *State {
	return w.operate("sync", func() *State {
		if !w.faults { // as the reconciler, which tries again to remove what could not be removed
			for i := range w.rec.Chains {
				w.rec.Chains[i].RemovalFailed = false
			}
		}
		s := w.Observe(context.Background(), w.stored, w.rec)
		if s.InSync() {
			return s
		}
		s = w.ObserveAgain(context.Background(), s)
		w.setTarget(s.Policies())
		w.repairs = true
		defer func() { w.repairs = false }()
		return w.run(s)
	})
}

func (w *world) run(s *State) *State {
	s.begin(1)
	w.planned, w.stuck, w.read = s.onRecord.planned, false, map[string]bool{guardTables: true}
	for _, t := range s.observed.tables {
		w.read[t.choice.String()] = true
	}
	s = takeSteps(context.Background(), s, worldEffects{does{w.Enforcer, w.lock}, w})
	w.judgeErrors(s)
	return s
}

// judgeErrors compares what a State says of chains with the kernel.
func (w *world) judgeErrors(s *State) {
	for _, c := range s.Chains {
		if c.Err != nil && strings.Contains(c.Err.Error(), "%!") {
			w.t.Fatalf("an error without its cause: %v\n%s", c.Err, w)
		}
	}
	if w.interfered() || s.progress.refused != nil { // a question reads for itself
		return
	}
	now := s.clone()
	for i := range now.Chains {
		now.Chains[i].failed = nil
	}
	now.Guard.failed = nil
	now = w.judged(func() *State { return w.ObserveAgain(context.Background(), now) })
	if s.Guard.unread != nil { // which fails chains that ask for one
		now.Guard = GuardState{}
	}
	for _, c := range s.Chains {
		is, says := now.Err(c.Policy.Chain), s.Err(c.Policy.Chain)
		if is != nil && says == nil {
			w.t.Fatalf("chain %s is right, the run says, and it is not: %v\n%s", c.Policy.Chain, is, w)
		}
		if is == nil && says != nil && errors.Is(says, s.RecordErr) && !w.missed { // not that it could not be read
			w.t.Fatalf("chain %s is right, the run says it is not: %v\n%s", c.Policy.Chain, says, w)
		}
	}
}

// judged observes without faults, which is no reading of the run.
func (w *world) judged(observe func() *State) *State {
	faults, seen, read := w.faults, maps.Clone(w.seen), maps.Clone(w.read)
	w.faults = false
	s := observe()
	w.faults, w.seen, w.read = faults, seen, read
	return s
}

// fault draws what becomes of an effect. A fault of the kernel is one that a program may have at any time.
func (w *world) fault(what string) error {
	const end = 200
	if w.effects++; w.effects > end {
		w.t.Fatalf("a run does not end\n%s", w)
	}
	if !w.faults {
		return nil
	}
	if w.fights {
		w.change("flush ruleset", "")
		return nil
	}
	most := 24
	if strings.HasPrefix(what, "observe") || strings.HasPrefix(what, "ask") { // of which there are many before a write
		most = 149
	}
	switch rapid.IntRange(0, most).Draw(w.t, what) {
	case 0, 1:
		return errFault
	case 2:
		w.noGuards = w.noGuards || what == "ask for a write of guards"
		return netfilter.ErrUnusable
	case 3:
		panic(killed{})
	case 4:
		w.tamper()
	}
	return nil
}

// begins is called before each effect at the ports. It draws what becomes of it.
func (w *world) begins(effect string, writes bool) error {
	read, reads := strings.CutPrefix(effect, "observe ")
	switch {
	case reads:
		w.read[read] = true
		if err := w.fault(effect); err != nil {
			w.missed = true
			return errFault // what can be used once is not unusable
		}
		w.seen[read] = w.now[read]
		w.kernel.Torn = 0
		if w.torn[read] = w.faults && rapid.IntRange(0, 24).Draw(w.t, "torn") == 0; w.torn[read] {
			w.kernel.Torn = 1
		}
	case strings.HasPrefix(effect, "ask for a write"):
		return w.fault(effect)
	case writes:
		if effect != "record" && !w.isOnRecord() {
			w.t.Fatalf("%s comes before the record of what the run is about to change, %+v\n%s", effect, w.planned, w)
		}
		if w.stuck {
			w.t.Fatalf("%s comes after a document could not be stored\n%s", effect, w)
		}
		if err := w.fault(effect); err != nil {
			w.stuck = effect == "store"
			return err
		}
		w.before, w.chains = w.wrong(), w.existing()
	}
	return nil
}

// existing returns the chains that are in any backend.
func (w *world) existing() map[policy.ChainFamily]bool {
	exist := map[policy.ChainFamily]bool{}
	for _, chains := range w.kernel.Chains {
		for ref := range chains {
			exist[ref] = true
		}
	}
	return exist
}

// resets reports whether the record has a reset for an address that left the node.
func (w *world) resets(used store.ChainAddress) bool {
	return slices.ContainsFunc(w.rec.Resets, func(r store.Reset) bool { return slices.Contains(r.Left, used) })
}

// kernelChains returns all chains.
func (w *world) kernelChains() map[netfilter.Choice]map[policy.ChainFamily]policy.Chain {
	all := map[netfilter.Choice]map[policy.ChainFamily]policy.Chain{}
	for in, chains := range w.kernel.Chains {
		all[in] = maps.Clone(chains)
	}
	return all
}

// isOnRecord reports whether the record has what the run has planned, resets excepted: a full disk has no room for them.
func (w *world) isOnRecord() bool {
	rec := w.rec
	rec.Resets = w.planned.Resets
	return reflect.DeepEqual(rec, w.planned)
}

// wrote is called after each write. It checks the invariants, and ends the process now and then.
func (w *world) wrote(what string, _ ...string) {
	exist := w.existing()
	if w.interfered() {
		w.before, w.chains = w.wrong(), exist
	}
	for _, g := range w.kernel.Guards {
		if ref := (policy.ChainFamily{Chain: g.Chain, Family: g.Family}); w.chains[ref] && !exist[ref] && g.HasEffect() {
			w.t.Fatalf("%s removes %s (%s) under a guard\n%s", what, g.Chain, g.Family, w)
		}
	}
	for tables := range w.now { // a run need not read what it has written; a removal notices no other program
		if strings.Contains(what, tables) && !strings.HasPrefix(what, "remove") {
			w.seen[tables] = w.now[tables]
		}
	}
	w.written++
	w.log = append(w.log, what)
	for choice, chains := range w.kernel.Chains {
		for ref := range chains {
			if !owns(w.rec, ref.Family, ref.Chain, choice) {
				w.t.Fatalf("%s (%s) in %s is not on record\n%s", ref.Chain, ref.Family, choice, w)
			}
			for _, r := range chains[ref].Rules {
				if !r.Address.IsValid() || w.returned[r.Address] {
					continue
				}
				used := store.ChainAddress{Chain: ref.Chain, Address: r.Address}
				if w.used[used] = true; !policy.LeftNode(r.Address, w.node) && !slices.Contains(inForce(w.rec), used) && !w.resets(used) {
					w.t.Fatalf("address %v is not on record\n%s", used, w)
				}
			}
		}
	}
	for in, chains := range w.keeps {
		for ref, c := range chains {
			if is, exists := w.kernel.Chains[in][ref]; len(c.Rules) > 0 && (!exists || !reflect.DeepEqual(is.Rules, c.Rules)) {
				w.t.Fatalf("%s changes %s (%s), and some documents cannot be read\n%s", what, ref.Chain, ref.Family, w)
			}
		}
	}
	for _, x := range w.wrong() {
		if !slices.Contains(w.before, x) && (x.what != noneInPlace || strings.HasPrefix(what, "remove") && !w.missed) {
			w.t.Fatalf("after %s chain %s %s: %+v\n%s", what, x.chain, x.what, x.packet, w)
		}
	}
	if w.faults && rapid.IntRange(0, 24).Draw(w.t, "killed") == 0 {
		panic(killed{})
	}
}

// judgedPackets are those of a pod, and of one that may be exempt by its namespace, to destinations in and outside each list.
func judgedPackets() (all []policy.Packet) {
	for _, to := range []string{"10.1.0.1", "192.0.2.1", "198.51.100.1", "203.0.113.9", "2001:db8:1::1", "2001:db8:2::1", "2001:db8:3::1"} {
		from := []string{"10.88.0.5", "10.88.0.9"}
		if strings.Contains(to, ":") {
			from = []string{"2001:db8:88::5", "2001:db8:88::9"}
		}
		for _, src := range from {
			for _, out := range []string{"eth0", "eth1"} {
				all = append(all, policy.Packet{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(to), Out: out})
			}
		}
	}
	return all
}

// wrong returns what guards do to packets that they must not do by the rules in the kernel.
func (w *world) wrong() (all []wrong) {
	for _, pkt := range w.packets {
		all = append(all, w.judge(pkt)...)
	}
	return all
}

func (w *world) judge(pkt policy.Packet) (all []wrong) {
	f := policy.FamilyOf(pkt.Dst)
	masquerades, exempts, masqueradedBy, hasRules := false, map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, chains := range w.kernel.Chains {
		for ref, c := range chains {
			if ref.Family != f || len(c.Jumps) == 0 {
				continue // without a jump its rules are missing
			}
			r := c.Walk(pkt)
			hasRules[c.Name] = hasRules[c.Name] || len(c.Rules) > 0
			if r != nil && r.Verdict == policy.Masquerade {
				masquerades, masqueradedBy[c.Name] = true, true
			}
			outside := !slices.ContainsFunc(c.Jumps, func(j policy.Rule) bool { return j.Matches(pkt) })
			exempts[c.Name] = exempts[c.Name] || outside || r != nil && r.Verdict == policy.Return
		}
	}
	for i, wants := range w.masqueradedBy(pkt) {
		if chain := w.target[i].Chain; wants != masqueradedBy[chain] {
			all = append(all, wrong{chain, fmt.Sprint("masquerades it: ", !wants), pkt})
			if !masquerades && !hasRules[chain] {
				all = append(all, wrong{chain, noneInPlace, pkt})
			}
		}
	}
	for _, g := range w.kernel.Guards {
		if g.Family != f {
			continue
		}
		if g.Mode == policy.GuardDrop && g.Scope.Contains(pkt) && !g.Exempt.Contains(pkt.Dst) && exempts[g.Chain] && !masquerades {
			all = append(all, wrong{g.Chain, "exempts what its guard drops", pkt})
		}
		if g.Bound != nil && g.Binds(pkt) && masquerades {
			all = append(all, wrong{g.Chain, "has a guard that binds what is masqueraded", pkt})
		}
	}
	return all
}

// tamper changes something as another program does.
func (w *world) tamper() {
	what := rapid.SampledFrom([]string{"flush ruleset", "delete guards", "delete chains", "flush chains", "delete jumps"}).Draw(w.t, "tamper")
	w.change(what, rapid.SampledFrom([]string{"", "", "A", "B", "C"}).Draw(w.t, "of"))
}

// change changes the chains, or guards, whose names have a prefix.
func (w *world) change(what, of string) {
	w.keeps = nil
	w.log = append(w.log, "-- another program: "+what+" "+of)
	for choice, chains := range w.kernel.Chains {
		if len(chains) > 0 && what != "delete guards" {
			w.now[choice.String()]++
		}
		for ref, c := range maps.Clone(chains) {
			if !strings.HasPrefix(ref.Chain, of) {
				continue
			}
			switch what {
			case "flush ruleset", "delete chains":
				delete(chains, ref)
				continue
			case "flush chains":
				c.Rules = nil
			case "delete jumps":
				c.Jumps = nil
			}
			w.kernel.Chains[choice][ref] = c
		}
	}
	if what == "flush ruleset" || what == "delete guards" {
		w.kernel.Guards = slices.DeleteFunc(append([]policy.Guard(nil), w.kernel.Guards...), func(g policy.Guard) bool { return strings.HasPrefix(g.Chain, of) })
		w.now[guardTables]++
	}
	if what != "delete guards" {
		w.kernel.Changed()
	}
}

const guardTables = "guards"

// writes writes tables, which a run does only after it has read what it wrote, and all after it was overtaken.
func (w *world) writes(tables string, write func() error) error {
	for of, read := range w.read {
		if !read {
			w.t.Fatalf("%s are written before %s are read again\n%s", tables, of, w)
		}
	}
	chains, left, guards, others, interfered := w.kernelChains(), maps.Clone(w.kernel.Leftovers), w.kernel.Guards, maps.Clone(w.now), w.interfered()
	err := write()
	if err == nil && !interfered && !w.missed && !w.torn[tables] && maps.Equal(others, w.now) && maps.Equal(left, w.kernel.Leftovers) && reflect.DeepEqual(guards, w.kernel.Guards) && reflect.DeepEqual(chains, w.kernel.Chains) {
		w.t.Fatalf("%s are written as they are\n%s", tables, w)
	}
	w.read[tables] = false
	if errors.Is(err, netfilter.ErrChanged) {
		for of := range w.read {
			w.read[of] = false
		}
	}
	return err
}

// interfered reports whether another program changed something since it was read. What a run does then is not judged, unless
// the kernel would have told it.
func (w *world) interfered() bool { return !maps.Equal(w.seen, w.now) }

// worldEffects are the effects of a run on the world.
type worldEffects struct {
	does
	w *world
}

func (e worldEffects) asking() effects {
	return &asks{Enforcer: e.Enforcer}
}

func (e worldEffects) read(ctx context.Context, s *State) {
	e.does.read(ctx, s)
	e.w.read[guardTables] = e.w.read[guardTables] || s.Guard.unusable != nil
}

func (e worldEffects) guards(ctx context.Context, guards []policy.Guard, g *GuardState) error {
	return e.w.writes(guardTables, func() error { return e.does.guards(ctx, guards, g) })
}

func (e worldEffects) rules(ctx context.Context, t *tables, desired policy.Ruleset, families differing) error {
	for i, c := range desired.Chains {
		if desired.Find(c.Family, c.Name) != &desired.Chains[i] {
			e.w.t.Fatalf("chain %s is desired twice\n%s", c.Name, e.w)
		}
	}
	return e.w.writes(t.choice.String(), func() error { return e.does.rules(ctx, t, desired, families) })
}

// desirePods finds the same addresses to take: the world has no attachments to read them from.
func (e worldEffects) desirePods(s *State) {
	taken := s.node.exempt.taken
	e.does.desirePods(s)
	s.node.exempt.taken = taken
}

func (e worldEffects) PutRecord(r store.Record) error {
	err := e.w.begins("record", true)
	if err != nil && e.w.repairs { // it goes on with what is on record
		e.w.planned = e.w.rec
	}
	if e.w.unrecorded = e.w.unrecorded || err != nil; err == nil {
		e.w.rec = r
		e.w.wrote("record")
	}
	return err
}

func (e worldEffects) Put(src policy.Source) error {
	err := e.w.begins("store", true)
	if err == nil {
		e.w.stored = WithSources(e.w.stored, src)
		e.w.wrote("store")
	}
	return err
}

func (e worldEffects) TakeAddresses(map[store.Attachment][]netip.Addr) error {
	if !e.w.interfered() {
		s := e.w.judged(func() *State { return e.w.Observe(context.Background(), e.w.stored, e.w.rec) })
		if e.w.noGuards {
			s.Guard = GuardState{}
		}
		for _, c := range s.Chains {
			if err := s.Err(c.Policy.Chain); len(c.Policy.Namespaces) > 0 && err != nil {
				e.w.t.Fatalf("an address is taken, and chain %s is not right: %v\n%s", c.Policy.Chain, err, e.w)
			}
		}
	}
	e.w.taken = true
	return e.w.fault("take")
}
