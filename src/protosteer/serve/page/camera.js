// Pictures of a class from the camera. Browsers offer one to pages of this machine and over https, to no others.
"use strict";
const camera = { stream: null, taken: 0 };

async function openCamera() {
  try {
    camera.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch (error) {
    return answer(whyNoCamera(error), "problem");
  }
  $("video").srcObject = camera.stream;
  $("viewfinder").hidden = false;
  $("camera").hidden = true;
  camera.stream.getVideoTracks()[0].addEventListener("ended", closeCamera);  // pulled out, or taken back by the user
  $("snap").focus();
}

function whyNoCamera({ name, message }) {
  if (name === "NotAllowedError") return "The browser does not let this page use the camera; allow it beside the address and try again.";
  if (name === "NotFoundError") return "No camera was found; connect one and try again.";
  return `The camera cannot be used (${message || name}); choose files instead.`;
}

/** The frame as it is, at the camera's own size, like a file that was chosen. */
async function takePicture() {
  const video = $("video"), frame = el("canvas", { width: video.videoWidth, height: video.videoHeight });
  if (!video.videoWidth) return answer("The camera is not ready yet; try again in a moment.", "problem");
  frame.getContext("2d").drawImage(video, 0, 0);
  const blob = await new Promise((done) => frame.toBlob(done, "image/jpeg", 0.92));
  addExamples([new File([blob], `camera ${++camera.taken}.jpg`, { type: "image/jpeg" })]);
}

function closeCamera() {
  for (const track of camera.stream?.getTracks() ?? []) track.stop();
  camera.stream = $("video").srcObject = null;
  $("viewfinder").hidden = true;
  $("camera").hidden = false;
  $("camera").focus();
}

function startCamera() {
  $("camera").hidden = !navigator.mediaDevices?.getUserMedia;
  $("camera").addEventListener("click", openCamera);
  $("snap").addEventListener("click", takePicture);
  $("camera-stop").addEventListener("click", closeCamera);
}
