// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// lockSeconds is how long iptables-legacy waits for the xtables lock.
	lockSeconds = 5
	lockFile    = "/run/xtables.lock"

	// limit is how long a program may take.
	limit = time.Minute
	// patience is how long a program may take, beside lockSeconds of iptables-legacy, before it counts as one
	// that hangs: other calls and processes do not wait for it then.
	patience = 2 * time.Second
)

// runFunc runs a program, as runner.run does.
type runFunc func(
	ctx context.Context, held *os.File, input []byte, path string, args ...string,
) ([]byte, error)

// programs finds and runs the programs of iptables.
//
// They are asked by go-iptables (ask.go). Rules are written by one iptables-restore for each
// family, which this package runs itself: Append, Delete and ClearChain of go-iptables, one after
// the other, let packets through with the wrong verdict in between, and its children outlive this
// process, after which another process may take the lock that they write under. Rules are read from
// the kernel, by netlink and by socket options: to read them through `iptables -S` takes 6 ms of
// each ADD, waits for an xtables lock that another program holds (2.7 s were measured), and shows
// native expressions of nft as rules that match more.
type programs struct {
	finder   finder
	run      runFunc
	limit    time.Duration
	patience time.Duration

	mu      sync.Mutex // of what follows
	handles map[string]*handle
	hangs   map[string]*hangMark
}

func newPrograms(path string) *programs {
	p := &programs{finder: newFinder(path), limit: limit, patience: patience}
	p.run = runner{limit}.run
	return p
}

func baseName(f policy.Family) string {
	if f == policy.IPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// locate finds iptables-VARIANT, or a plain iptables of the variant. The suffix "-restore" finds
// iptables-VARIANT-restore or iptables-restore.
func (p *programs) locate(ctx context.Context, f policy.Family, variant, suffix string) (string, error) {
	named, plain := baseName(f)+"-"+variant+suffix, baseName(f)+suffix
	path, err := p.finder.find(named, plain)
	if err != nil || filepath.Base(path) == named {
		return path, err
	}
	has, err := p.variantOf(ctx, path)
	if err != nil {
		return "", err
	}
	if has != variant {
		return "", fmt.Errorf("find %s: %s is of the %s variant; install the %s one too: %w",
			named, path, has, variant, fs.ErrNotExist)
	}
	return path, nil
}

// variantOf runs a program with --version to learn its variant. Versions before 1.8, all legacy, do
// not print it. go-iptables has the variant too, and does not tell; nor does it tell how a program
// failed that it asks for its version.
func (p *programs) variantOf(ctx context.Context, path string) (string, error) {
	out, err := twice(func() ([]byte, error) {
		// The variant is not known yet. That of nft has the shorter patience: no lock is needed to print a version.
		return p.execute(ctx, path, netfilter.VariantNFT, nil, nil, "--version")
	})
	if err != nil {
		return "", err
	}
	if bytes.Contains(out, []byte("(nf_tables)")) {
		return netfilter.VariantNFT, nil
	}
	return netfilter.VariantLegacy, nil
}

// restore runs iptables-restore --noflush. Legacy waits for the xtables lock.
func (p *programs) restore(
	ctx context.Context, f policy.Family, variant string, held *os.File, input []byte,
) error {
	path, err := p.locate(ctx, f, variant, "-restore")
	if err != nil {
		return err
	}
	args := []string{"--noflush"}
	if variant == netfilter.VariantLegacy {
		since162, err := p.since162(ctx, f, variant)
		if err != nil {
			return err
		}
		if since162 {
			args = append(args, "-w", strconv.Itoa(lockSeconds))
		} else {
			lock, err := takeXtablesLock(ctx)
			if err != nil {
				return err
			}
			defer func() { _ = lock.Close() }()
		}
	}
	_, err = p.execute(ctx, path, variant, held, input, args...)
	return err
}

// takeXtablesLock takes the lock for a program that does not know it. Closing the file gives it back.
func takeXtablesLock(ctx context.Context) (*os.File, error) {
	const pause = 50 * time.Millisecond
	file, err := openXtablesLock()
	if err != nil {
		return nil, fmt.Errorf("open the xtables lock: %w: %w", netfilter.ErrUnusable, err)
	}
	for end := time.Now().Add(lockSeconds * time.Second); ; time.Sleep(pause) {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return file, nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			_ = file.Close()
			return nil, fmt.Errorf("take the lock %s: %w: %w", lockFile, netfilter.ErrBusy, err)
		}
	}
}

// openXtablesLock opens the file of the lock as iptables-legacy does, which creates it.
func openXtablesLock() (*os.File, error) {
	return os.OpenFile(lockFile, os.O_RDONLY|os.O_CREATE, 0o600)
}

// execute runs a program, unless it hangs for another process already.
func (p *programs) execute(
	ctx context.Context, path, variant string, held *os.File, input []byte, args ...string,
) ([]byte, error) {
	mark := p.hangMark(path)
	if mark.isSet(p.finder.trusted) {
		return nil, hangsElsewhere(path)
	}
	end := mark.watch(p.patienceWith(variant))
	defer end()
	out, err := p.run(ctx, held, input, path, args...)
	if err != nil {
		return nil, failed(path, variant, err)
	}
	return out, nil
}

// patienceWith returns how long a program of the variant may take until it counts as one that hangs.
func (p *programs) patienceWith(variant string) time.Duration {
	if variant == netfilter.VariantLegacy {
		return p.patience + lockSeconds*time.Second
	}
	return p.patience
}

func (p *programs) hangMark(path string) *hangMark {
	p.mu.Lock()
	defer p.mu.Unlock()
	mark := p.hangs[path]
	if mark == nil {
		if p.hangs == nil {
			p.hangs = map[string]*hangMark{}
		}
		mark = newHangMark(path)
		p.hangs[path] = mark
	}
	return mark
}

// twice repeats what may have failed by accident, such as a program that crashed. A program that crashes twice in a
// row does so each time, which is a verdict on the host: otherwise ADD would answer "try again later" for ever,
// although another backend works.
func twice[T any](run func() (T, error)) (T, error) {
	out, err := run()
	if !mayBeAccident(err) {
		return out, err
	}
	out, err = run()
	return out, secondInARow(err)
}

func mayBeAccident(err error) bool {
	f, is := errors.AsType[*failure](err)
	return is && f.mayBeAccident
}

// secondInARow returns the error of what may have failed by accident right before, too.
func secondInARow(err error) error {
	f, is := errors.AsType[*failure](err)
	if !is || !f.mayBeAccident {
		return err
	}
	return f.withVerdict(netfilter.ErrUnusable, "twice in a row")
}
