// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/cniplugin"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

const (
	dataDir    = "/var/lib/cni/ip-masq"
	confDir    = "/etc/cni/net.d"
	agentDir   = "/etc/config"
	cacheDir   = "/var/lib/cni/results"
	pluginFile = "/etc/ip-masq/plugin.toml"
	bootFile   = "/proc/sys/kernel/random/boot_id"
)

// network is a network and what the scenario knows of its policy.
type network struct {
	*netSpec
	conf     *version  // in its conflist, nil without one
	bad      bool      // its file cannot be parsed
	since    int       // seq of its last change
	used     time.Time // when it was used last: it is dropped after ten minutes
	claims   []claim
	document string // its path in the dataDir
	nobody   *pod   // an address that no pod has; it runs as soon as the policy of the network is in force

	stated  *version // in entry_file, of the managed network
	written int      // how often the main CNI plugin has written its conflist
	others  string   // what the conflist is without the plugin entry, as other programs wrote it last
}

// claim is a policy that may be in force because a process has, or may have, stored it.
type claim struct {
	v *version // nil: the network has no document
	p *process // nil: from the beginning
}

// claim takes note that a policy may be in force.
func (n *network) claim(v *version, p *process) {
	if c := (claim{v, p}); !slices.Contains(n.claims, c) {
		n.claims = append(n.claims, c)
	}
}

// unclaim takes note that what a process was about to store is not in force.
func (n *network) unclaim(p *process) {
	n.claims = slices.DeleteFunc(n.claims, func(c claim) bool { return c.p == p })
}

// may reports whether a policy may be in force of which something is true.
func (n *network) may(is func(*version) bool) bool {
	return slices.ContainsFunc(n.claims, func(c claim) bool { return is(c.v) })
}

// mayNot is may for no policy at all.
func (n *network) mayNot() bool { return n.may(func(v *version) bool { return v == nil }) }

// some reports whether something is true of a network.
func (w *world) some(is func(*network) bool) bool { return slices.ContainsFunc(w.networks, is) }

// pod is an address. Several containers have it, one after the other.
type pod struct {
	number    int
	container int // of the present one, and how many there were
	net       *network
	space     string
	moved     bool // containers of different namespaces have had it
	addresses []netip.Addr
	phase     phase
	entry     *version

	expectation
	early  bool // it runs without an ADD, since before the conflist had an entry
	harmed bool // its ADD passed although a chain stayed as it was, or may not have taken the address: documents, stdin or the kernel
	beside bool // only because documents were damaged or lost, until they are written again
}

type phase int

const (
	gone phase = iota
	starting
	running
	stopping
)

func (p *pod) id(container int) string { return fmt.Sprintf("pod%d-%d", p.number, container) }

// do carries out one operation, and returns the process that it started, or nil.
func (w *world) do(o *op) (p *process) {
	n := w.networks[o.net]
	switch o.kind {
	case "add":
		p = w.add(o, n, n.conf)
	case "stale add":
		p = w.add(o, n, n.versions[o.version])
	case "early":
		w.early(o, n)
	case "del":
		p = w.del(o)
	case "check", "status":
		p = w.ask(o, n)
	case "gc":
		p = w.gc(o, n)
	case "once":
		p = w.once(o)
	case "next":
		w.armed = append(w.armed, *o)
	case "run":
		p = w.run(o)
		w.pass(time.Duration(o.number)*time.Millisecond, true)
	case "stop":
		if all := w.reconcilers(); len(all) > 0 {
			all[0].stop()
		}
	case "agree":
		w.agree(n)
	case "conflist":
		w.setConf(n, n.versions[o.version])
	case "no conflist":
		w.setConf(n, nil)
	case "main":
		if n := w.managed(); n != nil {
			w.disturbed()
			w.writeMain(n)
			w.filesChanged()
		}
	case "mesh":
		if n := w.managed(); n != nil {
			w.disturbed()
			w.writeMesh(n)
			w.filesChanged()
		}
	case "bad file":
		w.setConf(n, nil)
		w.machine.WriteFile(n.file(), "{")
		n.bad = true
	case "quiet":
		w.quiet()
	case "wait":
		w.until(w.idle)
	default:
		w.disturb(o)
	}
	if p != nil && o.wait && p.reconciler == nil {
		w.until(p.ended)
	}
	return p
}

// idle reports whether no process runs but reconcilers.
func (w *world) idle() bool {
	return !slices.ContainsFunc(w.running, func(p *process) bool { return !p.ended() && p.reconciler == nil })
}

func (n *network) file() string {
	if n.agent {
		return agentDir + "/ip-masq-agent"
	}
	return fmt.Sprintf("%s/1%d-%s.conflist", confDir, n.number, n.name)
}

func (w *world) setConf(n *network, v *version) {
	w.disturbed()
	if n == w.managed() {
		w.setEntry(n, v)
		w.filesChanged()
		return
	}
	n.bad = false
	switch {
	case v == nil:
		w.machine.Remove(n.file())
	case n.agent:
		w.machine.WriteFile(n.file(), marshal(v))
	default:
		w.machine.WriteFile(n.file(), marshal(map[string]any{
			"cniVersion": "1.1.0", "name": n.name, "plugins": []entry{{Type: "bridge"}, {Type: "ip-masq", version: v}},
		}))
	}
	w.confChanged(n, v)
}

// confChanged takes note that the conflist of a network has another entry.
func (w *world) confChanged(n *network, v *version) {
	w.disturbed()
	n.conf, n.since = v, w.seq
	w.filesChanged()
	w.mayRead(w.syncs()...)
	for _, p := range w.running {
		if !p.ended() && (w.harmed() || w.scenario.admin && p.network == n) { // it may read this one
			w.mayRead(p)
		}
	}
	w.note("conflist of %s is %s", n.name, v)
}

func marshal(v any) string { return string(must(json.Marshal(v))) }

// verb starts the verb of an operation, in a process of its own.
func (w *world) verb(o *op, args *skel.CmdArgs, finish func(*process)) *process {
	return w.start(o, func(p *process) error {
		plugin := cniplugin.Plugin{
			Drivers: w.kernel.Drivers(), Program: "program", Version: "v1", Generation: w.kernel.Drivers().Generation, Addresses: w.kernel.Addresses,
			Conntrack: w.kernel.Conntrack, PluginFile: pluginFile, LockWait: 10 * time.Second, Stdout: &p.stdout, Stderr: &p.stderr,
		}
		f := plugin.Funcs()
		verbs := map[string]func(*skel.CmdArgs) error{
			"add": f.Add, "stale add": f.Add, "del": f.Del, "gc": f.GC, "check": f.Check, "status": f.Status,
		}
		return verbs[o.kind](args)
	}, finish)
}

// entry is a plugin entry, and what libcni adds to it for a call.
type entry struct {
	Type string `json:"type"`
	*version
	CNIVersion string `json:"cniVersion,omitempty"`
	Name       string `json:"name,omitempty"`
	PrevResult any    `json:"prevResult,omitempty"`
	Valid      any    `json:"cni.dev/valid-attachments,omitempty"`
}

// stdin returns what libcni gives to the plugin.
func stdin(v *version, n *network, e entry) *skel.CmdArgs {
	e.Type, e.version, e.CNIVersion, e.Name = "ip-masq", v, "1.1.0", n.name
	return &skel.CmdArgs{StdinData: []byte(marshal(e))}
}

// args returns the arguments for a container of a pod.
func (w *world) args(p *pod, v *version, n *network, container int) *skel.CmdArgs {
	ips := []any{}
	for _, ipv6 := range []bool{false, true} {
		if !ipv6 || v != nil && v.IPv6 {
			ips = append(ips, map[string]any{"address": p.net.address(ipv6, p.number).String(), "interface": 0})
		}
	}
	args := stdin(v, n, entry{PrevResult: map[string]any{
		"cniVersion": "1.1.0", "ips": ips, "interfaces": []any{map[string]any{"name": "eth0", "sandbox": "/run/netns/x"}},
	}})
	args.ContainerID, args.IfName, args.Netns = p.id(container), "eth0", "/run/netns/x"
	if args.Args = "IgnoreUnknown=1;K8S_POD_NAME=" + p.id(container); p.space != "" {
		args.Args += ";K8S_POD_NAMESPACE=" + p.space
	}
	return args
}

func codeOf(err error) uint {
	if coded, is := errors.AsType[*types.Error](err); is {
		return coded.Code
	}
	return 0
}

func (w *world) add(o *op, n *network, v *version) *process {
	pod := w.pods[o.pod]
	if v == nil || n.agent || pod.phase == starting || pod.phase == stopping || w.runs("gc", n) {
		return nil
	}
	if pod.phase == running && o.number < 4 && pod.entry != nil { // the runtime repeats the ADD
		n, v = pod.net, pod.entry
	} else {
		space := spaces[o.number%len(spaces)]
		pod.moved = pod.moved || pod.container > 0 && pod.space != space
		pod.container++
		pod.net, pod.space, pod.early = n, space, false
	}
	pod.phase, pod.entry = starting, v
	pod.addresses = n.addresses(pod.number)
	container := pod.container
	args := w.args(pod, v, n, container)
	differs := w.scenario.admin && v != n.conf
	stale := v != n.conf && n.conf != nil && !w.scenario.admin && !n.may(func(v *version) bool { return v != n.conf })
	if w.scenario.admin {
		v = n.conf // whatever stdin says
	}
	stored := w.stored(n)
	p := w.verb(o, args, func(p *process) {
		w.counts["ADD"]++
		if pod.container != container || pod.phase != starting { // of another boot
			w.resolve(n, p, v)
			return
		}
		pod.phase = gone
		if p.returned && p.err == nil {
			w.counts["ADD passed"]++
			pod.phase = running
			w.connect(pod)
			w.connect(pod)
			// Beside a chain of others that the kernel refuses an ADD passes.
			doubtful := differs || w.scenario.admin && (n.since > p.start || p.faulty) || p.refused || w.refused() || w.kernel.refuses == "guards"
			pod.harmed, pod.beside = w.harmed() || doubtful, w.harmed() && !doubtful
			if p.stdout.Len() == 0 {
				w.object("%s passes without a result", p.Name)
			}
		}
		if codeOf(p.err) == 11 && p.rules {
			w.object("%s cannot write its state, and has written rules: %v", p.Name, p.err)
		}
		if stale && w.alone(p) && n.since < p.start && w.healthy(p) && !w.harmed() { // what is stored is the conflist's
			n.unclaim(p)
		}
		if w.stored(n) != stored && p.returned && p.err != nil && w.refusedFirst(p, v) {
			w.object("%s fails and has stored a policy that the kernel refuses", p.Name)
		}
		w.resolve(n, p, v)
		w.judgeADD(p, v, pod)
	})
	p.network = n
	if v != nil {
		n.claim(v, p)
	}
	for _, other := range w.networks {
		if other.conf != nil && w.harmed() { // it may write a damaged document again
			other.claim(other.conf, p)
		}
	}
	return p
}

// runs reports whether a verb runs for a network.
func (w *world) runs(verb string, n *network) bool {
	return slices.ContainsFunc(w.running, func(p *process) bool { return !p.ended() && p.op.kind == verb && p.network == n })
}

// resolve takes note of how a process ended that was about to store a policy.
func (w *world) resolve(n *network, p *process, v *version) {
	switch {
	case !p.returned:
	case p.err == nil:
		if w.healthy(p) && v != nil {
			w.written(n)
			n.nobody.phase = running
		}
		if !w.harmed() { // or the chains stay as they are
			w.repaired(p)
			if v != nil && v == n.conf && n.since < p.start && (!p.faulty || !w.scenario.admin) { // or its conflist could not be read
				w.settle(n, p, v)
			}
		}
	case codeOf(p.err) == 7, codeOf(p.err) == 11 && w.healthy(p), w.refusedFirst(p, v):
		n.unclaim(p)
	}
}

// refusedFirst reports whether the kernel refused a policy while rules were in force, which no other process removed: then it
// is not stored.
func (w *world) refusedFirst(p *process, v *version) bool {
	return p.ruled && w.alone(p) && len(w.book.orphans) == 0 && w.kernel.refuses == "prefixes" && v != nil && v.refused && w.healthy(p) && !w.harmed()
}

// written takes note that the document of a network was written again.
func (w *world) written(n *network) {
	if w.harmed() {
		w.book.faultTime = time.Now() // a reconciler does not know yet, and backs off
	}
	w.book.harmed = slices.DeleteFunc(w.book.harmed, func(file string) bool { return file == n.document })
	for _, p := range w.pods {
		if p.beside && !w.harmed() {
			p.harmed, p.beside = false, false
		}
	}
}

// harmed reports whether a document is damaged or lost.
func (w *world) harmed() bool { return len(w.book.harmed) > 0 }

// settle takes note that a process has stored a policy: only those that ran at the same time can have stored another one.
func (w *world) settle(n *network, p *process, v *version) {
	if n.agent && len(w.reconcilers()) > 0 { // which read agent files a little later than another process, and not again with the lock
		return
	}
	n.claims = slices.DeleteFunc(n.claims, func(c claim) bool { return c.v != v && (c.p == nil || !c.p.beside(p)) })
	if !n.may(func(x *version) bool { return x == v }) {
		n.claim(v, p)
	}
}

// beside reports whether a process ran while another one did, which has just ended.
func (p *process) beside(q *process) bool {
	if p.reconciler != nil {
		return p.last > q.start || slices.Contains(q.midway, p)
	}
	return !p.ended() || p.end > q.start
}

// early starts a pod without the plugin, as before its conflist had an entry: it is known by the runtime's cache alone.
func (w *world) early(o *op, n *network) {
	pod := w.pods[o.pod]
	if n.agent || n.conf != nil || pod.container > 0 {
		return
	}
	w.disturbed()
	pod.container, pod.net, pod.space, pod.addresses = 1, n, spaces[o.number%len(spaces)], n.addresses(pod.number)
	pod.phase, pod.entry = running, nil
	pod.early, pod.harmed = true, true // until it is on record
	id := pod.id(pod.container)
	w.machine.WriteFile("/run/netns/"+id, "")
	conf := marshal(map[string]any{"cniVersion": "1.1.0", "name": n.name, "plugins": []entry{{Type: "bridge"}}})
	if n == w.managed() {
		conf = n.mainText("bridge")
	}
	var ips []any
	for i := range pod.addresses {
		ips = append(ips, map[string]any{"address": n.address(i > 0, pod.number).String()})
	}
	w.machine.WriteFile(n.cached(id), marshal(map[string]any{
		"kind": "cniCacheV1", "networkName": n.name, "containerId": id, "ifName": "eth0", "netns": "/run/netns/" + id,
		"config": []byte(conf), "cniArgs": [][2]string{{"K8S_POD_NAMESPACE", pod.space}, {"K8S_POD_NAME", id}},
		"result": map[string]any{"cniVersion": "1.1.0", "ips": ips},
	}))
	w.counts["pods without an ADD"]++
	w.note("%s runs without an ADD (%v, namespace %q)", id, pod.addresses, pod.space)
	w.filesChanged()
}

// cached returns the file of a container in the runtime's cache.
func (n *network) cached(id string) string { return cacheDir + "/" + n.name + "-" + id + "-eth0" }

// recordEarly takes note that a sync has recorded the pods of a network in the runtime's cache.
func (w *world) recordEarly(n *network) {
	for _, p := range w.pods {
		if p.early && p.net == n {
			p.harmed = false
		}
	}
}

// endEarly ends a container that had no ADD: the runtime removes its network namespace and then its file.
func (w *world) endEarly(id string, n *network) {
	w.machine.Remove("/run/netns/" + id)
	w.machine.Remove(n.cached(id))
	w.filesChanged()
}

func (w *world) del(o *op) *process {
	pod := w.pods[o.pod]
	if pod.container == 0 || pod.phase == starting || pod.phase == stopping {
		return nil
	}
	container := pod.container
	if o.number < 3 && container > 1 { // late, of a former container
		container--
	} else if pod.phase == running {
		pod.phase = stopping
	}
	n, id := pod.net, pod.id(container)
	_, isEarly := w.machine.ReadFile(n.cached(id))
	if isEarly && n.conf == nil { // the runtime's configuration has no entry
		if pod.phase == stopping {
			pod.phase = gone
		}
		w.endEarly(id, n)
		return nil
	}
	return w.verb(o, w.args(pod, pod.entry, pod.net, container), func(p *process) {
		if container == pod.container && pod.phase == stopping {
			pod.phase = gone
		}
		if isEarly {
			w.endEarly(id, n)
		}
		if p.returned && p.err != nil {
			w.object("DEL fails: %v", p.err)
		}
	})
}

func (w *world) gc(o *op, n *network) *process {
	if n.agent || w.runs("add", n) || w.runs("stale add", n) { // a runtime does not call it meanwhile
		return nil
	}
	valid := []types.GCAttachment{}
	for _, p := range w.pods {
		for c := 1; p.net == n && p.phase != gone && c <= p.container; c++ {
			if c == p.container || o.number < 4 {
				valid = append(valid, types.GCAttachment{ContainerID: p.id(c), IfName: "eth0"})
			}
		}
	}
	p := w.verb(o, stdin(n.conf, n, entry{Valid: valid}), func(*process) {})
	p.network = n
	return p
}

// ask starts a CHECK or a STATUS.
func (w *world) ask(o *op, n *network) *process {
	pod := w.pods[o.pod]
	if o.kind == "check" && (pod.phase != running || pod.entry == nil) || o.kind == "status" && (n.conf == nil || n.agent) {
		return nil
	}
	args := stdin(n.conf, n, entry{})
	if o.kind == "check" {
		args = w.args(pod, pod.entry, pod.net, pod.container)
	}
	return w.verb(o, args, func(p *process) {
		if p.writes > 0 {
			w.object("%s writes", p.Name)
		}
		if o.kind == "check" && p.returned && p.err == nil && w.alone(p) && pod.phase == running && !w.harmed() { // or what exists is right
			w.objectTo(pod, false)
		}
		undisturbed := max(w.book.fault, w.book.disrupted, w.book.tampered, w.book.addressed, w.counts["kills"]) == 0
		if o.kind == "check" && p.returned && codeOf(p.err) == 101 && n.conf != nil && undisturbed && !w.refused() && pod.phase == running {
			w.object("%s fails where all is right before and after what others write meanwhile: %v", p.Name, p.err)
		}
	})
}

// alone reports whether no other process ran at the same time.
func (w *world) alone(p *process) bool {
	return w.book.disrupted < p.start && !slices.ContainsFunc(w.running, func(q *process) bool { return q != p && q.beside(p) })
}

// node returns the reconciler's node.
func (w *world) node() *reconcile.Node {
	s := config.DefaultSettings()
	s.DataDir, s.CNIConfDir = dataDir, confDir
	if w.some(func(n *network) bool { return n.agent }) {
		s.AgentConfigDir = agentDir
	}
	n := reconcile.Open(s, pluginFile, w.kernel.Drivers())
	n.Version, n.Conntrack, n.Addresses = "v1", w.kernel.Conntrack, w.kernel.Addresses
	n.CacheDir = cacheDir
	return n
}

// once starts one sync, as a command does.
func (w *world) once(o *op) *process {
	var report *reconcile.Report
	node := w.node()
	p := w.start(o, func(*process) error {
		report = node.Sync(context.Background(), node.Read())
		return nil
	}, func(p *process) {
		w.counts["sync"]++
		if !p.returned {
			return
		}
		for _, problem := range report.Problems {
			w.note("  problem: %s %s %s: %v", problem.Reason, problem.Source, problem.Chain, problem.Err)
		}
		for _, warning := range report.Warnings {
			w.note("  warning: %v", warning)
		}
		refused := w.refused()
		for _, n := range w.networks {
			n.claims = slices.DeleteFunc(n.claims, func(c claim) bool { return c.p == p && w.refusedFirst(p, c.v) })
		}
		healthy := report.Ready() || w.excused(report)
		if healthy && w.healthy(p) {
			stored := slices.DeleteFunc(slices.Clone(w.networks), func(n *network) bool { return n.conf == nil || n.since > p.start })
			for _, n := range stored {
				w.written(n)
			}
			if !w.harmed() {
				w.repaired(p)
				for _, n := range stored {
					w.settle(n, p, n.conf)
					w.recordEarly(n)
				}
				w.staleRemoved()
				for _, n := range w.networks { // what is stored is in force
					if !slices.ContainsFunc(n.claims, func(c claim) bool { return c.v == nil || c.p != nil && !c.p.ended() }) {
						n.nobody.phase = running
					}
				}
			}
		}
		if !healthy && !refused && !w.changedSince(p) && w.healthy(p) && w.alone(p) && !w.refused() && !w.harmed() && w.book.tampered == 0 &&
			w.kernel.refuses != "guards" { // it may have read conflists before they changed
			w.object("a sync is not ready although nothing fails: %v", report.Problems[0].Err)
		}
	})
	w.mayRead(p)
	return p
}

// use takes note of the networks that are in use, and of those that may be dropped now.
func (w *world) use() {
	for _, n := range w.networks {
		if !w.unused(n) {
			n.used = time.Now()
		} else if since := time.Since(n.used); since >= 10*time.Minute && since < time.Hour {
			n.used = time.Time{}
			w.mayRead(w.syncs()...)
		}
	}
}

// syncs returns the processes that sync.
func (w *world) syncs() []*process {
	return slices.DeleteFunc(slices.Clone(w.running), func(p *process) bool { return p.ended() || p.op.kind != "once" && p.reconciler == nil })
}

// unused reports whether a network has no conflist and no pod.
func (w *world) unused(n *network) bool {
	badConflist := w.some(func(n *network) bool { return n.bad && !n.agent }) // it may be that of any network
	return !n.agent && !badConflist && !slices.ContainsFunc(w.pods, func(p *pod) bool {
		return p.net == n && p != n.nobody && p.phase > starting && (!p.early || !p.harmed) // which is no attachment
	})
}

// bad reports whether a file of the configuration cannot be parsed.
func (w *world) bad() bool {
	return w.some(func(n *network) bool { return n.bad })
}

// disturb is what other programs, disks and time do.
func (w *world) disturb(o *op) {
	w.disturbed()
	w.book.disrupted = w.seq
	k, m := w.kernel, w.machine
	w.note("%s", o)
	w.disturbing = true
	defer func() { w.disturbing = false }()
	switch o.kind {
	case "commit":
		k.Generation.Number++
		k.written()
		k.seq-- // it changes nothing owned
	case "tamper":
		w.tamper(o.number)
	case "fight":
		for range []int{2, 3, 4, 5, 6, 7, 8, 37}[o.number] {
			w.tamper(o.number)
			w.disturbing = false
			w.pass(time.Duration(1+o.number)*10*time.Millisecond, !o.wait)
			w.disturbing = true
		}
		w.book.fought = time.Now()
	case "sleep":
		w.disturbing = false
		w.pass([]time.Duration{time.Millisecond, 50 * time.Millisecond, time.Second, 3 * time.Second, 11 * time.Second, time.Minute, 4 * time.Minute, 11 * time.Minute}[o.number], !o.wait)
		if !o.wait {
			w.book.frozen = time.Now()
		}
	case "address":
		a := nodeAddresses[2+o.number%3]
		if i := slices.Index(k.addresses, a); i >= 0 {
			k.addresses = slices.Delete(slices.Clone(k.addresses), i, i+1)
			for i := range k.connections {
				c := &k.connections[i]
				c.left = c.left || c.translated() && c.ReplyDst == a.Address
			}
		} else {
			k.addresses = append(slices.Clip(k.addresses), a)
		}
		w.book.addressed = w.seq
		w.tell(func(p *process) { p.loop.AddressesChanged() })
	case "clock":
		w.setClock(o.number)
	case "connect":
		w.connect(w.pods[o.pod])
	case "disk full", "disk read-only", "disk broken", "disk good":
		m.Disk = strings.TrimPrefix(o.kind, "disk ")
		w.fault()
		w.counts["disk faults"]++
	case "refuse", "accept":
		was := k.refuses
		w.book.stuck = w.book.stuck || w.refused() && w.hasStale() // until the next sync
		if k.refuses = ""; o.kind == "refuse" {
			k.refuses = []string{"prefixes", "prefixes", "prefixes", "prefixes", "prefixes", "walks", "guards", "guards"}[o.number]
		}
		if was == "walks" {
			w.book.warned = time.Now() // or a moment ago
		}
		lost := w.book.resetsLost || was == "prefixes" || was == "guards" || o.kind == "refuse" && k.refuses != "walks"
		w.fault()
		w.book.resetsLost = lost
	case "reboot":
		w.reboot()
	case "damage", "lose":
		w.harm(o)
	default:
		panic("simulation: no operation " + o.kind)
	}
}

// setClock sets the wall clock.
func (w *world) setClock(number int) {
	const day, year = 24 * time.Hour, 365 * 24 * time.Hour
	forward := []time.Duration{time.Minute, time.Hour, day, year, 20 * year, -time.Minute, -time.Hour, -year}[number]
	w.counts["steps of the clock"]++
	w.machine.SetClock(forward)
	if forward == -time.Minute {
		w.book.ahead += time.Minute
	}
	for _, n := range w.networks { // one that is unused is dropped ten minutes after the times of its files
		n.used = time.Now().Add(-10 * time.Minute)
	}
}

// stored returns the document of a network. One that a process was about to drop when it was killed is stored: the next one that
// takes the lock restores it.
func (w *world) stored(n *network) string {
	text, exists := w.machine.ReadFile(n.document)
	if !exists {
		text, _ = w.machine.ReadFile(n.document + ".dropped")
	}
	return text
}

func (w *world) reboot() {
	w.counts["reboots"]++
	synced := w.rand.IntN(2) == 0
	before := map[*network]string{}
	for _, n := range w.networks {
		before[n], _ = w.machine.ReadFile(n.document)
	}
	w.machine.Crash(synced)
	for _, n := range w.networks {
		if !synced && w.counts["kills"] > 0 { // a killed process may have renamed a document, and not synced it
			n.claim(nil, nil)
		}
		after, exists := w.machine.ReadFile(n.document)
		if exists && before[n] != "" && after != before[n] { // it was replaced, and that was not synced
			for _, v := range n.versions {
				n.claim(v, nil)
			}
		}
	}
	for _, p := range slices.DeleteFunc(slices.Clone(w.running), (*process).ended) {
		w.kill(p)
	}
	w.kernel.boot(pick(w.rand, 1, w.kernel.Generation.Number))
	w.boot()
	for _, p := range w.pods {
		p.phase = gone
	}
	w.book.tampered, w.book.guardTampered, w.book.resetsLost, w.book.stuck = 0, false, false, false
	w.book.unruled = true
	w.forgetHarmed()
}

// forgetHarmed takes note that chains are created again without the damaged documents.
func (w *world) forgetHarmed() {
	for _, n := range w.networks {
		if slices.Contains(w.book.harmed, n.document) {
			n.claim(nil, nil)
		}
	}
}

// harm damages or removes a file of the dataDir.
func (w *world) harm(o *op) {
	n, record := w.networks[o.net], dataDir+"/record.json"
	file := n.document
	switch o.number {
	case 0, 1:
		file = record
	case 2:
		w.machine.Remove(strings.TrimSuffix(file, ".json") + ".verified")
		return
	case 3:
		file = dataDir + "/sources"
	}
	w.fault()
	if file == record { // chains that are not on record stay
		w.book.recordLost, w.book.stuck = true, true
		for choice := range w.kernel.Chains {
			for _, ref := range w.kernel.Refs(choice) {
				w.book.orphans = append(w.book.orphans, ref.Chain)
			}
		}
		isWriting := !w.idle() || len(w.midway()) > 0 // a process may have recorded its chain, and writes it now
		for _, n := range w.networks {
			for _, c := range n.claims {
				if c.v != nil && isWriting {
					w.book.orphans = append(w.book.orphans, c.v.Chain)
				}
			}
		}
	}
	text, is := w.machine.ReadFile(file)
	switch {
	case o.kind == "lose":
		w.machine.Remove(file)
		for _, p := range w.pods { // nothing tells that a document was damaged
			p.beside = false
		}
		for _, n := range w.networks {
			if file == n.document || o.number == 3 {
				n.claim(nil, nil)
				w.book.harmed = append(w.book.harmed, n.document) // the subnets of its pods are lost, too
			}
		}
	case is:
		if w.machine.WriteFile(file, text[:len(text)/2]); file == record {
			return
		}
		w.book.harmed = append(w.book.harmed, file)
		if !n.may(func(v *version) bool { return v != nil && w.kernel.has(v.Chain) }) {
			n.claim(nil, nil) // its chain is created without it
		}
	}
}

// tamper changes owned rules as another program may do.
func (w *world) tamper(number int) {
	k := w.kernel
	touched := []string{""}
	for _, in := range []netfilter.Choice{netfiltertest.NFTables, netfiltertest.IPTables, netfiltertest.Legacy} {
		of := k.Chains[in]
		for _, ref := range k.Refs(in) {
			chain := of[ref]
			touched = append(touched, ref.Chain)
			switch number {
			case 2, 3:
				chain.Jumps = nil
			case 4:
				chain.Rules = nil
			case 5:
				chain.Rules = slices.Insert(slices.Clone(chain.Rules), 0, policy.Rule{Verdict: policy.Masquerade})
			}
			if of[ref] = chain; number < 2 {
				delete(of, ref)
			}
		}
	}
	if number <= 1 || number == 4 {
		w.forgetHarmed()
	}
	if number == 6 || number == 0 {
		k.Guards = nil
	}
	if number == 7 && len(k.Guards) > 0 {
		w.book.guardTampered = true
		k.Guards = slices.Clone(k.Guards)
		k.Guards[0].Exempt = policy.Ranges{}
	}
	k.Changed()
	k.written(touched...)
	w.disturbed()
	w.book.tampered, w.book.disrupted = w.seq, w.seq
	w.counts["tampers"]++
}

// connect begins a connection of a pod.
func (w *world) connect(p *pod) {
	if p.phase != running || p.early { // whose subnet may be unknown
		return
	}
	src := pick(w.rand, p.addresses...)
	dst := pick(w.rand, slices.DeleteFunc(slices.Clone(w.probes), func(dst netip.Addr) bool { return dst.Is4() != src.Is4() })...)
	o := w.kernel.packet(src, dst)
	if o.dropped {
		return
	}
	c := connection{
		Connection: policy.Connection{Src: src, Dst: dst, ReplySrc: dst, ReplyDst: src}, pod: p, container: p.container, space: p.space,
		began: w.seq, tampered: w.book.tampered > 0 || w.book.stuck, stale: w.book.stuck,
		between: w.book.tampered > 0 && slices.ContainsFunc(w.running, func(p *process) bool { return p.start < w.book.tampered }),
	}
	if o.translated {
		c.ReplyDst = o.from
		if i := slices.IndexFunc(nodeAddresses, func(a policy.NodeAddress) bool { return a.Address.Is4() == src.Is4() }); !o.from.IsValid() {
			c.ReplyDst = nodeAddresses[i].Address
		}
	}
	if all := w.combinations(); len(all) == 1 {
		c.policies = all[0]
	}
	w.kernel.connections = append(w.kernel.connections, c)
	w.note("  a connection of %s to %s begins, %v", p.id(p.container), dst, &c)
}
