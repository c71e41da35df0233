// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	goiptables "github.com/coreos/go-iptables/iptables"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// handle asks one program of iptables, of one family, through go-iptables.
//
// go-iptables has no context, no limit and no death signal. So each call runs in a goroutine of its
// own. At its limit the program is killed, and the caller gets an error: nothing waits for a
// program that hangs, even for one that the kernel cannot end. The program has the environment of
// this process (SetEnvironment).
type handle struct {
	path   string
	family policy.Family
	turn   chan struct{} // has an item while a call is not answered
	// opened is used by the call that has the turn alone. It is nil until New succeeded, which runs the program to
	// learn its version.
	opened *goiptables.IPTables
}

var errStopped = errors.New("it was stopped")

// list returns the rules of a chain of table nat as `iptables -S` prints them. A rule with a line
// feed in its comment is one item. To list a table of iptables-legacy would create it.
func (p *programs) list(ctx context.Context, f policy.Family, variant, chain string) ([]string, error) {
	exists, err := inUse(f, variant)
	if err != nil || !exists {
		return nil, err
	}
	lines, err := ask(ctx, p, f, variant, func(ipt *goiptables.IPTables) ([]string, error) {
		return ipt.List(Table, chain)
	})
	var rules []string
	for _, line := range joinQuoted(lines) {
		if strings.HasPrefix(line, "-A ") {
			rules = append(rules, line)
		}
	}
	return rules, err
}

// listAll asks a program for all rules of table nat, and returns why it does not list them. The table must exist: to
// list one of iptables-legacy would create it.
func (p *programs) listAll(ctx context.Context, f policy.Family, variant string) error {
	_, err := ask(ctx, p, f, variant, func(ipt *goiptables.IPTables) ([]string, error) {
		return ipt.ListChains(Table) // by `iptables -S`, without a chain
	})
	return err
}

// hasChain reports whether a program sees a chain of table nat.
func (p *programs) hasChain(ctx context.Context, f policy.Family, variant, chain string) (bool, error) {
	exists, err := inUse(f, variant)
	if err != nil || !exists {
		return false, err
	}
	return ask(ctx, p, f, variant, func(ipt *goiptables.IPTables) (bool, error) {
		return ipt.ChainExists(Table, chain)
	})
}

// since162 reports whether a program is of version 1.6.2 or later. That is the first one with
// --random-fully, and whose iptables-restore knows the xtables lock.
func (p *programs) since162(ctx context.Context, f policy.Family, variant string) (bool, error) {
	return ask(ctx, p, f, variant, func(ipt *goiptables.IPTables) (bool, error) {
		return ipt.HasRandomFully(), nil
	})
}

// version returns the version of a program, such as 1.8.9.
func (p *programs) version(ctx context.Context, f policy.Family, variant string) (string, error) {
	return ask(ctx, p, f, variant, func(ipt *goiptables.IPTables) (string, error) {
		major, minor, patch := ipt.GetIptablesVersion()
		return fmt.Sprintf("%d.%d.%d", major, minor, patch), nil
	})
}

// inUse reports whether a program may list table nat: the variant legacy would create one that does
// not exist.
func inUse(f policy.Family, variant string) (bool, error) {
	if variant != netfilter.VariantLegacy {
		return true, nil
	}
	exists, err := legacyInUse(f, Table)
	if err != nil {
		return false, readError(err)
	}
	return exists, nil
}

// joinQuoted joins the lines of an argument in quotes.
func joinQuoted(lines []string) []string {
	var joined []string
	open := false // in quotes that the line before began
	for _, line := range lines {
		if open {
			joined[len(joined)-1] += "\n" + line
		} else {
			joined = append(joined, line)
		}
		if !quotesBalance(line) {
			open = !open
		}
	}
	return joined
}

func quotesBalance(line string) bool {
	balance, escaped := true, false
	for _, r := range line {
		switch {
		case escaped:
			escaped = false
		case r == '\\':
			escaped = true
		case r == '"':
			balance = !balance
		}
	}
	return balance
}

// question asks go-iptables.
type question[T any] func(*goiptables.IPTables) (T, error)

// ask asks the program of a family and a variant.
func ask[T any](
	ctx context.Context, p *programs, f policy.Family, variant string, q question[T],
) (T, error) {
	var none T
	path, err := p.locate(ctx, f, variant, "")
	if err != nil {
		return none, err
	}
	h := p.handle(path, f)
	return twice(func() (T, error) { return askOnce(ctx, p, h, variant, q) })
}

func (p *programs) handle(path string, f policy.Family) *handle {
	p.mu.Lock()
	defer p.mu.Unlock()
	h := p.handles[path]
	if h == nil {
		if p.handles == nil {
			p.handles = map[string]*handle{}
		}
		h = &handle{path: path, family: f, turn: make(chan struct{}, 1)}
		p.handles[path] = h
	}
	return h
}

// answer is what a call of go-iptables returned.
type answer[T any] struct {
	value T
	err   error
}

func askOnce[T any](
	ctx context.Context, p *programs, h *handle, variant string, q question[T],
) (T, error) {
	var none T
	mark := p.hangMark(h.path)
	if mark.isSet(p.finder.trusted) {
		return none, hangsElsewhere(h.path)
	}
	if err := h.takeTurn(ctx, p.patienceWith(variant)); err != nil {
		return none, err
	}
	caller, err := ns.GetCurrentNS()
	if err != nil {
		h.endTurn()
		return none, fmt.Errorf("run %s: %w", h.path, err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, p.limit, didNotEnd(p.limit))
	defer cancel()
	threads := make(chan int, 1)
	answers := make(chan answer[T], 1)
	go func() {
		var got answer[T]
		end := mark.watch(p.patienceWith(variant))
		err := runIn(caller, func() {
			threads <- unix.Gettid()
			got.value, got.err = callGoIPTables(ctx, h, q)
		})
		end()
		_ = caller.Close()
		if err != nil {
			got.err = err
		}
		h.endTurn()
		answers <- got
	}()
	var a answer[T]
	select {
	case a = <-answers:
	case <-ctx.Done():
		stop(threads, answers)
		a.err = fmt.Errorf("%w: %w", context.Cause(ctx), errStopped)
	}
	if unopened, is := errors.AsType[*openError](a.err); is {
		return none, p.whyUnopened(ctx, h.path, variant, unopened)
	}
	if a.err != nil {
		return none, failed(h.path, variant, a.err)
	}
	return a.value, nil
}

// openError is an error of New, which has the text of its cause alone.
type openError struct{ error }

// whyUnopened asks for the version as New did, and returns why that fails.
func (p *programs) whyUnopened(ctx context.Context, path, variant string, err *openError) error {
	if _, cause := p.variantOf(ctx, path); cause != nil {
		return cause
	}
	f := failed(path, variant, err)
	f.mayBeAccident = true
	f.verdict = netfilter.ErrBusy
	return f
}

// stop ends the program that a call runs, and waits a moment for the end of the call: it may be
// about to start a program.
func stop[T any](threads <-chan int, answers <-chan answer[T]) {
	const (
		tries = 10
		pause = 20 * time.Millisecond
	)
	var thread int
	for range tries {
		select {
		case <-answers:
			return
		case thread = <-threads:
		default:
		}
		if thread != 0 {
			killChildren(fmt.Sprintf("/proc/self/task/%d/children", thread))
		}
		select {
		case <-answers:
			return
		case <-time.After(pause):
		}
	}
}

// runIn calls a function on a thread that is in a network namespace. Only a caller whose thread is
// in another one than the process needs the privilege to enter it.
func runIn(namespace ns.NetNS, call func()) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := ns.GetCurrentNS()
	if err != nil {
		return err
	}
	defer func() { _ = here.Close() }()
	var a, b unix.Stat_t
	err = errors.Join(unix.Fstat(int(here.Fd()), &a), unix.Fstat(int(namespace.Fd()), &b))
	if err != nil {
		return err
	}
	if a.Dev == b.Dev && a.Ino == b.Ino {
		call()
		return nil
	}
	return namespace.Do(func(ns.NetNS) error {
		call()
		return nil
	})
}

// takeTurn waits until no other call of the program runs, as long as one that does not hang takes.
func (h *handle) takeTurn(ctx context.Context, patience time.Duration) error {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case h.turn <- struct{}{}:
		return nil
	case <-timer.C:
		return fmt.Errorf("run %s: %w, since another call of it: %w", h.path, errHangs, netfilter.ErrBusy)
	case <-ctx.Done():
		return fmt.Errorf("run %s: %w: %w", h.path, context.Cause(ctx), netfilter.ErrBusy)
	}
}

func (h *handle) endTurn() { <-h.turn }

// callGoIPTables opens the handle if necessary, and asks.
func callGoIPTables[T any](
	ctx context.Context, h *handle, q question[T],
) (value T, err error) {
	if h.opened == nil {
		family := goiptables.ProtocolIPv4
		if h.family == policy.IPv6 {
			family = goiptables.ProtocolIPv6
		}
		h.opened, err = goiptables.New(
			goiptables.Path(h.path), goiptables.IPFamily(family), goiptables.Timeout(lockSeconds))
		if err != nil {
			h.opened = nil
			return value, &openError{err}
		}
	}
	if ctx.Err() != nil { // it hung while it was opened
		return value, ctx.Err()
	}
	return q(h.opened)
}
