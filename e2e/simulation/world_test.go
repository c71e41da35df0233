// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"bytes"
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/simulation/system"
)

// world is the node, its processes, and what the scenario has stated so far.
type world struct {
	scenario *scenario
	machine  *system.Machine
	kernel   *kernel
	rand     *rand.Rand // of the order of effects

	mu       sync.Mutex
	parked   []*ticket
	running  []*process
	last     *process // that had the last effect
	switches int      // one effect in so many goes to another process
	holds    bool     // which has all effects until it ends or waits
	holder   *process
	effects  int
	seq      int // counts effects and everything else that happens

	networks   []*network
	pods       []*pod       // the last one is that of no operation; then one address of each network that no pod has
	probes     []netip.Addr // the destinations that tell policies apart
	book       book
	counts     map[string]int
	disturbing bool     // another program has the next effect
	notices    []func() // events of the kernel and of files, which reconcilers do not know yet
	hurry      int      // one effect in so many comes after the next of them
	armed      []op     // events of whatever process has the effect
	begins     bool     // the next operation does, by its event

	trace     []string
	objection string
}

// process is a verb or a sync that runs, or has ended.
type process struct {
	*system.Process
	op       *op
	network  *network // of an ADD or a GC
	ordinal  int
	start    int // seq
	end      int
	writes   int   // how many effects of it were writes
	rules    bool  // one of them was a write of rules
	event    event // of op, until it has happened
	paused   int   // seq of its pause; 0: it does not pause
	err      error
	returned bool      // it was not killed
	walked   time.Time // when the last walk through the connections had begun when it started
	stdout   bytes.Buffer
	stderr   bytes.Buffer
	finish   func(*process) // called by the scheduler when it has ended
	refused  bool           // a call of the kernel failed on purpose
	faulty   bool           // an effect of it failed on purpose
	last     int            // seq of its last effect
	ruled    bool           // there were owned chains when it started
	tampers  int            // there were when it started
	midway   []*process     // reconcilers that were about to have an effect when it started

	*reconciler // nil of all others
}

// ticket is a process that waits for its next effect.
type ticket struct {
	p      *process
	text   string
	writes bool
	resume chan struct{}
	err    error
}

// boot gives the machine a new boot.
func (w *world) boot() {
	id := make([]byte, 16)
	for i := range id {
		id[i] = byte(w.machine.Rand.UintN(256))
	}
	w.machine.WriteFile(bootFile, fmt.Sprintf("%08x-%04x-%04x-%04x-%012x\n", id[:4], id[4:6], id[6:8], id[8:10], id[10:]))
	w.machine.WriteFile(cacheDir+"/.keep", "")
	w.machine.Remove("/run/netns")
	w.machine.WriteFile("/run/netns/.keep", "")
	w.machine.WriteFile("/opt/cni/bin/ip-masq", "program")
	w.machine.WriteFile("/proc/thread-self/ns/net", "")
}

// start starts a process.
func (w *world) start(o *op, do func(p *process) error, finish func(*process)) *process {
	w.disturbed()
	p := &process{
		Process: &system.Process{Name: o.String()}, op: o, event: o.event, ordinal: len(w.running), start: w.seq, finish: finish,
		walked: w.book.walked, ruled: w.kernel.has(""), midway: w.midway(), tampers: w.counts["tampers"],
	}
	w.running = append(w.running, p)
	w.note("%s begins", p.Name)
	w.machine.Go(p.Process, func() {
		defer func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			if r := recover(); r != nil && !p.Dead {
				w.object("a verb or a sync panics: %v\n%s", r, debug.Stack())
			}
			p.end = -1
		}()
		p.err = do(p)
		p.returned = !p.Dead
	})
	return p
}

// midway returns the reconcilers that are about to have an effect.
func (w *world) midway() (all []*process) {
	for _, t := range w.parked {
		if t.p.reconciler != nil && !slices.Contains(all, t.p) {
			all = append(all, t.p)
		}
	}
	return all
}

// step is called by each effect. It waits until the process has its turn. What a killed process still does has no effect.
func (w *world) step(of *system.Process, text string, writes bool) error {
	if of == nil {
		return nil
	}
	if of.Dead {
		return unix.EIO
	}
	w.mu.Lock()
	i := slices.IndexFunc(w.running, func(p *process) bool { return p.Process == of })
	writes = writes || strings.HasPrefix(text, "create ") || strings.HasPrefix(text, "remove ")
	t := &ticket{p: w.running[i], text: text, writes: writes, resume: make(chan struct{})}
	w.parked = append(w.parked, t)
	w.mu.Unlock()
	<-t.resume
	return t.err
}

// until lets processes run, one effect after the other, until the condition holds.
func (w *world) until(condition func() bool) { w.runUntil(condition, time.Hour, false) }

// meanwhile lets the processes that run have some effects, so that the operation comes in the middle of them.
func (w *world) meanwhile(o *op) {
	if o.event.what == "begin" {
		w.armed, w.begins = append(w.armed, *o), false
		end := time.Now().Add(time.Second)
		w.until(func() bool { return w.begins || !time.Now().Before(end) })
		return
	}
	end := w.effects + w.rand.IntN(pick(w.rand, 1, 30, 120, 400))
	canGoOn := func(t *ticket) bool { return t.p.paused == 0 }
	w.until(func() bool { return w.effects >= end || len(w.notices) == 0 && !slices.ContainsFunc(w.parked, canGoOn) })
}

// pass lets time pass. Others than reconcilers may be frozen meanwhile.
func (w *world) pass(d time.Duration, frozen bool) {
	end := time.Now().Add(d)
	w.runUntil(func() bool { return !time.Now().Before(end) }, d, frozen)
}

func (w *world) runUntil(condition func() bool, longest time.Duration, frozen bool) {
	const shortest, slowest = time.Millisecond, 5 * time.Second
	end, wait := time.Now().Add(longest), shortest
	for w.objection == "" {
		synctest.Wait()
		w.finished()
		w.use()
		w.conflistChanged()
		w.judge()
		if w.objection != "" || condition() {
			return
		}
		if len(w.notices) > 0 && (len(w.parked) == 0 || w.rand.IntN(w.hurry) == 0) {
			w.notices[0]()
			w.notices = w.notices[1:]
			wait = shortest
			continue
		}
		if t := w.choose(frozen); t != nil {
			wait = shortest
			w.turn(t)
			continue
		}
		w.judgeQuiet()
		if !time.Now().Before(end) {
			w.object("no process goes on")
		}
		time.Sleep(min(wait, time.Until(end))) // processes wait for timers
		wait = min(2*wait, slowest)
	}
}

// finished takes note of processes that have ended.
func (w *world) finished() {
	for _, p := range w.running {
		if p.end != -1 {
			continue
		}
		w.disturbed()
		p.end = w.seq
		switch {
		case p.Dead:
			w.note("%s was killed", p.Name)
		case p.err != nil:
			w.note("%s fails: %v", p.Name, p.err)
		default:
			w.note("%s ends", p.Name)
		}
		if p.stderr.Len() > 0 {
			w.note("  %s", bytes.TrimSpace(p.stderr.Bytes()))
		}
		if p.warnsOfConnections() {
			w.book.warned = time.Now()
		}
		if p.writes > 0 && (p.Dead || p.err != nil) {
			w.book.half = w.seq
		}
		w.book.unfinished = w.book.unfinished || p.Dead || p.warnsOfConnections() || !w.alone(p) // which renews resets
		p.finish(p)
	}
}

func (p *process) ended() bool { return p.end > 0 }

// warnsOfConnections reports whether a verb said that a walk through the connections is not finished.
func (p *process) warnsOfConnections() bool {
	return strings.Contains(p.stderr.String(), "connections")
}

// choose takes a ticket, nil if there is none. A process that pauses has its turn when no other process can go on.
func (w *world) choose(frozen bool) *ticket {
	slices.SortStableFunc(w.parked, func(a, b *ticket) int { return cmp.Or(a.p.ordinal-b.p.ordinal, cmp.Compare(a.text, b.text)) })
	without := func(tickets []*ticket, is func(*ticket) bool) []*ticket {
		return slices.DeleteFunc(slices.Clone(tickets), is)
	}
	may := without(w.parked, func(t *ticket) bool { return frozen && t.p.reconciler == nil })
	if len(may) == 0 {
		return nil
	}
	if all := without(may, func(t *ticket) bool { return t.p.paused > 0 }); len(all) > 0 {
		may = all
	} else {
		may = []*ticket{slices.MinFunc(may, func(a, b *ticket) int { return a.p.paused - b.p.paused })}
		may[0].p.paused = 0
	}
	i := slices.IndexFunc(may, func(t *ticket) bool { return t.p == w.last })
	if i < 0 || w.last != w.holder && w.rand.IntN(w.switches) == 0 {
		if i = w.rand.IntN(len(may)); w.holds && len(may) > 1 {
			w.holder = may[i].p
		}
	}
	w.parked = without(w.parked, func(t *ticket) bool { return t == may[i] })
	return may[i]
}

// turn gives a process its effect, unless the scenario ends it there or makes the effect fail.
func (w *world) turn(t *ticket) {
	p := t.p
	w.last = p
	if w.effects++; w.effects > 100_000 {
		w.object("%s does not end", p.Name)
	}
	w.seq++
	p.last = w.seq
	ofKernel, happens, number := strings.HasPrefix(t.text, "kernel: "), "", p.op.number
	if p.event.due(t) {
		happens = p.event.what
	}
	for i := range w.armed {
		if o := &w.armed[i]; o.event.due(t) {
			happens, number = o.event.what, o.number
		}
	}
	if happens == "pause" {
		w.note("%s pauses", p.Name)
		p.paused = w.seq
		w.parked = append(w.parked, t)
		return
	}
	if t.writes {
		p.writes++
	}
	if strings.HasPrefix(t.text, "kernel: write") || strings.HasPrefix(t.text, "kernel: remove") {
		p.rules = true
	}
	if strings.HasPrefix(t.text, "kernel: walk") {
		w.book.walked = time.Now()
		w.book.resetsLost = w.book.resetsLost || w.book.half > p.start // for its rules, which this walk does not see
	}
	switch happens {
	case "kill":
		w.note("%s: killed before: %s", p.Name, t.text)
		w.counts["kills"]++
		t.err = unix.EIO
		w.kill(p)
	case "fail":
		t.err, p.faulty, p.refused = unix.EIO, true, p.refused || ofKernel
		w.note("%s: fails: %s", p.Name, t.text)
		w.counts["failed effects"]++
		lost := w.book.resetsLost || !ofKernel // a walk or a write that fails is repeated
		if strings.HasPrefix(t.text, "kernel: walk") {
			w.book.warned = time.Now() // the process says so, or its log
		}
		w.fault()
		w.book.resetsLost = lost
		w.book.stuck = w.book.stuck || strings.HasPrefix(t.text, "kernel: remove") || t.text == "kernel: observe guards" // under which none goes
	case "tamper":
		w.disturbing = true
		w.tamper(number)
		w.disturbing = false
		fallthrough
	default:
		w.note("%s: %s", p.Name, t.text)
	}
	w.begins = w.begins || happens == "begin"
	close(t.resume)
}

// kill ends a process.
func (w *world) kill(p *process) {
	p.Kill()
	if p.reconciler != nil {
		p.stop()
	}
	w.parked = slices.DeleteFunc(w.parked, func(t *ticket) bool {
		if t.p == p {
			t.err = unix.EIO
			close(t.resume)
		}
		return t.p == p
	})
}

// end ends everything.
func (w *world) end() {
	isAlive := func(p *process) bool { return p.end == 0 }
	for _, p := range slices.DeleteFunc(slices.Clone(w.running), (*process).ended) {
		w.kill(p)
	}
	synctest.Wait()
	for i := 0; i < 100 && slices.ContainsFunc(w.running, isAlive); i++ {
		time.Sleep(time.Second)
		synctest.Wait()
	}
}

func (w *world) note(format string, args ...any) {
	if w.objection == "" {
		w.trace = append(w.trace, fmt.Sprintf("%6d %s", w.seq, fmt.Sprintf(format, args...)))
	}
}

// object takes note of what is wrong.
func (w *world) object(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	w.note("OBJECTION: %s", text)
	w.objection = cmp.Or(w.objection, text)
}
