// SPDX-License-Identifier: Apache-2.0

package system

import (
	"bytes"
	"context"
	"maps"
	"math/rand/v2"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Machine is a simulated machine.
type Machine struct {
	// Step is called before each effect, with its text. The error is that of the effect.
	Step func(p *Process, effect string, writes bool) error
	// Rand decides what a crash leaves, and the names of temporary files.
	Rand *rand.Rand
	// Disk is its state: good, full, read-only, or broken.
	Disk string
	// Writes counts the changes of files.
	Writes int

	root   *inode
	inodes uint64
	booted time.Time
	ticks  time.Duration

	mu        sync.Mutex
	processes map[unsafe.Pointer]*Process // by the labels of its goroutines
}

// Process is a simulated process: its goroutines and its open files.
type Process struct {
	Name string
	Dead bool

	files map[int]*File
	last  int
}

// Bad reports whether some writes fail.
func (m *Machine) Bad() bool { return m.Disk != "good" }

// machine is the one that runs. The product has no parameter for it.
var machine *Machine //nolint:gochecknoglobals // the operating system is global to a program, too

// NewMachine returns a machine that has just booted, with an empty disk, and makes it the one that runs.
func NewMachine(r *rand.Rand) *Machine {
	m := &Machine{Disk: "good", Rand: r, booted: time.Now(), processes: map[unsafe.Pointer]*Process{}}
	m.root = m.newNode(unix.S_IFDIR | 0o755)
	machine = m
	return m
}

// Go runs a function as a process, in a goroutine of its own.
func (m *Machine) Go(p *Process, do func()) {
	p.files = map[int]*File{}
	go func() {
		pprof.SetGoroutineLabels(pprof.WithLabels(context.Background(), pprof.Labels("process", p.Name)))
		m.mu.Lock()
		m.processes[labels()] = p
		m.mu.Unlock()
		do()
	}()
}

// labels returns the labels of the calling goroutine for profiles, which goroutines inherit that it starts.
//
//go:linkname labels runtime/pprof.runtime_getProfLabel
func labels() unsafe.Pointer

// Kill ends a process before its next effect. The kernel closes its files.
func (p *Process) Kill() {
	p.Dead = true
	for _, f := range p.files {
		f.unlock()
	}
	p.files = map[int]*File{}
}

// Current returns the process of the calling goroutine. The simulation itself has none.
func (m *Machine) Current() *Process {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.processes[labels()]
}

// step is called before each effect on files.
func (m *Machine) step(effect, path string, writes bool) error {
	p := m.Current()
	if p == nil {
		return nil
	}
	if err := m.Step(p, effect+" "+path, writes); err != nil {
		return err
	}
	switch {
	case !writes:
	case m.Disk == "read-only":
		return unix.EROFS
	case m.Disk == "broken":
		return unix.EIO
	}
	return nil
}

// inode is a file or a directory. What is durable survives a crash.
type inode struct {
	number  uint64
	mode    uint32
	changed time.Time
	holders map[*File]bool // of the lock; true: exclusive

	data, durable []byte

	entries, kept map[string]*inode
	log           []change // of entries, since kept
	gone          bool
}

// change is the entries that one call changed in a directory; nil is a removed one.
type change map[string]*inode

func (m *Machine) newNode(mode uint32) *inode {
	m.inodes++
	n := &inode{number: m.inodes, mode: mode, changed: time.Now(), holders: map[*File]bool{}}
	if n.isDir() {
		n.entries, n.kept = map[string]*inode{}, map[string]*inode{}
	}
	return n
}

func (n *inode) isDir() bool { return n.mode&unix.S_IFMT == unix.S_IFDIR }

func (n *inode) put(c change) {
	for name, node := range c {
		if n.entries[name] = node; node == nil {
			delete(n.entries, name)
		}
	}
	n.changed, n.log = time.Now(), append(n.log, c)
}

func (n *inode) names() []string { return slices.Sorted(maps.Keys(n.entries)) }

// sync makes a file or a directory durable.
func (n *inode) sync() {
	n.durable, n.kept, n.log = append([]byte{}, n.data...), maps.Clone(n.entries), nil
}

// Crash ends all processes without warning and boots again. Of what was not synced, a directory keeps the first changes,
// and a file keeps all, a part or nothing of its data, unless all is synced before.
func (m *Machine) Crash(synced bool) {
	for _, p := range m.processes {
		if p != nil {
			p.Kill()
		}
	}
	if !synced {
		m.crash(m.root)
	}
	m.booted, m.Disk = time.Now(), "good"
}

func (m *Machine) crash(n *inode) {
	n.holders = map[*File]bool{}
	if n.isDir() {
		changes, changed := n.log[:m.Rand.IntN(len(n.log)+1)], n.changed
		n.entries = n.kept
		for _, c := range changes {
			n.put(c)
		}
		n.changed = changed
		n.sync()
		for _, name := range n.names() {
			m.crash(n.entries[name])
		}
		return
	}
	if n.durable == nil || !bytes.Equal(n.durable, n.data) {
		switch m.Rand.IntN(4) {
		case 0:
			n.data = n.durable
		case 1:
			n.data = nil
		case 2:
			n.data = n.data[:m.Rand.IntN(len(n.data)+1)]
		}
	}
	n.sync()
}

// The functions below are the simulation's own, without effects.

// SetClock sets the wall clock forward, or back, seen from the files: their times are of the former clock.
func (m *Machine) SetClock(forward time.Duration) { m.root.setBack(forward) }

func (n *inode) setBack(d time.Duration) {
	n.changed = n.changed.Add(-d)
	for _, e := range n.entries {
		e.setBack(d)
	}
}

// WriteFile writes a durable file, and the directories to it.
func (m *Machine) WriteFile(path, text string) {
	m.Writes++
	dir := m.root
	names := strings.Split(strings.Trim(path, "/"), "/")
	put := func(name string, n *inode) {
		dir.put(change{name: n})
		dir.sync()
	}
	for _, name := range names[:len(names)-1] {
		if dir.entries[name] == nil {
			put(name, m.newNode(unix.S_IFDIR|0o755))
		}
		dir = dir.entries[name]
	}
	file := m.newNode(unix.S_IFREG | 0o700)
	file.data = []byte(text)
	file.sync()
	put(names[len(names)-1], file)
}

// ReadFile returns the text of a file.
func (m *Machine) ReadFile(path string) (string, bool) {
	at, err := m.find(m.root, path)
	if err != nil || at.node == nil || at.node.isDir() {
		return "", false
	}
	return string(at.node.data), true
}

// Names returns the names in a directory.
func (m *Machine) Names(path string) []string {
	if at, err := m.find(m.root, path); err == nil && at.node != nil {
		return at.node.names()
	}
	return nil
}

// Remove removes a file or a directory with all that is in it.
func (m *Machine) Remove(path string) {
	m.Writes++
	if at, err := m.find(m.root, path); err == nil && at.node != nil {
		at.dir.put(change{at.name: nil})
		at.dir.sync()
		at.node.remove()
	}
}

func (n *inode) remove() {
	n.gone = true
	for _, e := range n.entries {
		e.remove()
	}
}

// place is where a path leads: to nothing, if its directory lacks the last name.
type place struct {
	dir  *inode
	name string
	node *inode
}

// find returns where a path leads. There are no symlinks.
func (m *Machine) find(dir *inode, path string) (place, error) {
	if strings.HasPrefix(path, "/") {
		dir = m.root
	}
	at := place{dir: dir, node: dir}
	for name := range strings.FieldsFuncSeq(path, func(r rune) bool { return r == '/' }) {
		switch {
		case name == ".":
			continue
		case at.node == nil:
			return place{}, unix.ENOENT
		case !at.node.isDir():
			return place{}, unix.ENOTDIR
		}
		at = place{at.node, name, at.node.entries[name]}
	}
	return at, nil
}

func (n *inode) stat(st *unix.Stat_t) {
	*st = unix.Stat_t{Dev: 1, Ino: n.number, Mode: n.mode, Nlink: 1, Size: int64(len(n.data))}
	st.Mtim = unix.NsecToTimespec(n.changed.UnixNano())
}
