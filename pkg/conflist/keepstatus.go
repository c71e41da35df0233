// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Status is what a look of a Keeper found and did.
type Status struct {
	// Leads is false where it is not for this process to write; the rest is the
	// zero value then.
	Leads bool
	// Present tells that the network has our entry now.
	Present bool
	// War tells that somebody removes it again and again.
	Flapping bool
	// Wrote tells that the look put the entry in.
	Wrote bool
	// Problems are why the node is not ready.
	Problems []Problem
}

// Problem is a reason why the node is not ready.
type Problem struct {
	Err error
	// Waiting says that what is missing is expected to come by itself.
	Waiting bool
	// Plugin says that it is about the plugin's binary.
	Plugin bool

	topic string // that of which one message is enough; "" : the error's text
}

func (s *Status) problem(err error) {
	if err != nil {
		s.Problems = append(s.Problems, Problem{Err: err})
	}
}

// Topics of messages with names or numbers that change from one try to the next.
const (
	warTopic     = "war"
	failureTopic = "failure"
)

// describe adds the problems to the status. Those that keep pods from starting with an
// entry that is there are found by the loop, with and without a Keeper.
func (k *Manager) describe(s *Status, n Network, err, plugin error) {
	if plugin != nil && !s.Present {
		s.Problems = append(s.Problems, Problem{Plugin: true, Err: fmt.Errorf("%w, so no plugin entry is put into the conflist, "+
			`and no pod would start with it: run "ip-masq-reconciler install", or name another directory with --cni-bin-dir`, plugin)})
	}
	if err := n.Multus.Err(n.Name); err != nil && s.Present {
		s.Problems = append(s.Problems, Problem{Err: err, Waiting: n.Multus.Depth == 1})
	}
	switch {
	case errors.Is(err, config.ErrPosition):
	case errors.Is(err, ErrNone), errors.Is(err, ErrNotThere):
		s.Problems = append(s.Problems, Problem{Err: k.absence(err), Waiting: true})
	case harmless(err):
		s.problem(err)
	case err != nil:
		s.Problems = append(s.Problems, Problem{Err: k.refusal(err), topic: failureTopic})
	}
	if s.Flapping {
		s.Problems = append(s.Problems, Problem{Err: k.accusation(), topic: warTopic})
	}
}

// absence is the error of a network that is not there.
func (k *Manager) absence(err error) error {
	what := "the main CNI plugin's network"
	if k.options.Network != "" {
		what += " " + policy.Printable(k.options.Network)
	}
	remedy := "set cni_conf_dir if it is elsewhere"
	if errors.Is(err, ErrNotThere) {
		remedy = err.Error()
	}
	if names := setAside(k.options.Dir); len(names) > 0 {
		remedy = fmt.Sprintf("Cilium has set %s aside: %s", policy.Printable(strings.Join(names, ", ")), parties()[0].remedy)
	}
	return fmt.Errorf("waiting for %s in %s; %s", what, policy.Printable(k.options.Dir), remedy)
}

// refusal is the error of files that cannot be written.
func (k *Manager) refusal(err error) error {
	err = fmt.Errorf("our entry cannot be put in; it is tried again: %w", err)
	for _, known := range []error{unix.EROFS, unix.EACCES, unix.EPERM} {
		if errors.Is(err, known) {
			return fmt.Errorf("%w; let the reconciler write to %s: in a container, mount it writable; in a unit of systemd, "+
				"add ReadWritePaths=%s", err, policy.Printable(k.options.Dir), policy.Printable(k.options.Dir))
		}
	}
	return err
}

// accusation says who removes our entry again and again.
func (k *Manager) accusation() error {
	count, span := k.flapping.span(time.Now())
	then := "it is put back at once each time"
	if wait := k.flapping.delay(); wait >= firstPause {
		then = fmt.Sprintf("it stays away for %s now each time", wait)
	}
	by := suspect(k.seen)
	return fmt.Errorf("%s: our entry is removed again and again (%d times within %s), most likely by %s; %s: %s",
		policy.Printable(k.seen.Path), count, span.Truncate(time.Second)+time.Second, by.name, then, by.remedy)
}

// journal writes a Keeper's log: what is news, once.
type journal struct {
	log   *slog.Logger
	known map[string]bool // problems that hold
	said  map[string]bool // what is said once
}

// mostSaid bounds what is remembered; beyond it, things are said again.
const mostSaid = 100

func (j *journal) report(s Status) {
	now, grave := map[string]bool{}, false
	for _, p := range s.Problems {
		topic := p.topic
		if topic == "" {
			topic = p.Err.Error()
		}
		now[topic] = true
		grave = grave || !p.Waiting
		switch {
		case j.known[topic]:
		case p.Waiting:
			j.log.Info(p.Err.Error())
		default:
			j.log.Error(p.Err.Error(), "topic", "conflist")
		}
	}
	delete(j.known, warTopic) // its end is told by itself
	if len(now) == 0 && len(j.known) > 0 && s.Leads && !s.Wrote {
		j.log.Info("the conflist is as it should be again")
	}
	j.known = now
}

// wrote tells of the first repair in a while, and of the others who wants every
// detail.
func (j *journal) wrote(c Change, m *Multus, text string, removals int) {
	level := slog.LevelInfo
	if removals > 1 {
		level = slog.LevelDebug
	}
	args := []any{"file", policy.Printable(c.Path), "network", policy.Printable(c.Network)}
	if m != nil {
		args = append(args, "multus", policy.Printable(m.Path))
	}
	if c.Backup != "" {
		args = append(args, "backup", policy.Printable(c.Backup))
	}
	j.log.Log(context.Background(), level, text, args...)
}

func (j *journal) once(text string, reason error) {
	key := text + reason.Error()
	if j.said[key] {
		return
	}
	if j.said == nil || len(j.said) >= mostSaid {
		j.said = map[string]bool{}
	}
	j.said[key] = true
	j.log.Warn(text, "reason", reason.Error())
}
